"""Steps as msgpack, for followers in other processes."""

from __future__ import annotations

from typing import Any, get_args

import msgspec

from tilewright.compiler.targets.interface.step import PrefillChunk, Slot, StateUpdate, Step

_EDITS: tuple[type, ...] = get_args(StateUpdate)
_KINDS = {kind: number for number, kind in enumerate(_EDITS)}
_READERS: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in _EDITS]
_Fields = tuple[
    tuple[Slot, ...],
    tuple[PrefillChunk, ...],
    tuple[tuple[int, msgspec.Raw], ...],
    dict[int, int],
    dict[int, tuple[int, ...]],
    dict[int, int],
    bool,
    int | None,
    bool,
]
_READER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Fields)


def step_bytes(step: Step) -> bytes:
    """Encode a step for :func:`read_step`."""
    edits = [(_KINDS[type(edit)], edit) for edit in step.edits]
    fields = (
        *(step.decode, step.prompts, edits, dict(step.forced), dict(step.drafts)),
        *(dict(step.proposes), step.masked, step.logprobs, step.want_logits),
    )
    return msgspec.msgpack.encode(fields)


def read_step(data: bytes) -> Step:
    """Decode a step from :func:`step_bytes`."""
    fields = _READER.decode(data)
    decode, prompts, edits, forced, drafts, proposes, masked, logprobs, want_logits = fields
    return Step(
        decode=decode,
        prompts=prompts,
        edits=tuple(_READERS[kind].decode(raw) for kind, raw in edits),
        forced=forced,
        drafts=drafts,
        proposes=proposes,
        masked=masked,
        logprobs=logprobs,
        want_logits=want_logits,
    )
