"""Parts of steps with drafts, and their outputs. Excludes acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.compiler.targets.interface.step import SampledTokens, Step


def divide(step: Step) -> tuple[Step, Step]:
    """Return a step's slots with drafts, which have no masks, and its other slots."""
    found = []
    for has_drafts in (True, False):
        decode = tuple(slot for slot in step.decode if (slot in step.drafts) is has_drafts)
        forced = {slot: token for slot, token in step.forced.items() if slot in decode}
        found.append(replace(step, decode=decode, forced=forced, prompts=(), edits=()))
    verified, others = found
    return replace(verified, masked=False), replace(others, drafts={})


def output_at(chosen: SampledTokens, index: int) -> SampledTokens:
    """Return a single token's output."""
    scores = None if chosen.logprobs is None else (chosen.logprobs[index],)
    return SampledTokens((chosen.tokens[index],), (chosen.why[index],), scores)


def join(slots: Iterable[Sequence[SampledTokens]]) -> SampledTokens:
    """Join the outputs of several slots."""
    slots = list(slots)
    outputs = [output for slot in slots for output in slot]
    scores = [output.logprobs[0] for output in outputs if output.logprobs is not None]
    return SampledTokens(
        [output.tokens[0] for output in outputs],
        [output.why[0] for output in outputs],
        scores or None,
        counts=[len(slot) for slot in slots],
    )
