"""Limits on a tokenizer.json, checked before the tokenizers library reads it.

The library trusts sizes, and chains of lengthening steps grow a text without bound.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path

from tilewright.errors import CheckpointError

MAX_UNUSED_IDS = 1 << 16
MAX_GROWTH = 10_000
_CHAINS = ("normalizer", "pre_tokenizer", "post_processor")
_MEMBERS = ("normalizers", "pretokenizers", "processors")
# The table defines a character's replacement: a single long entry is enough.
_PRECOMPILED_GROWTH = 1000


def check_costs(values: Mapping[str, object], path: Path) -> None:
    """Reject a tokenizer with a memory need far beyond its file size, for tables or texts.

    Raises:
        CheckpointError: A limit is exceeded. The message has ``path``.
    """
    model = values.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        largest = max((index for index in vocab.values() if isinstance(index, int)), default=0)
        # The library lists every unused id below the largest id.
        if largest > (limit := 2 * len(vocab) + MAX_UNUSED_IDS):
            raise CheckpointError(f"{path}: token id {largest}; allowed: 0 to {limit}")
    for chain in _CHAINS:
        growth = 1.0
        for step in _steps(values.get(chain)):
            if step.get("type") == "Precompiled":
                _check_charsmap(step.get("precompiled_charsmap"), path)
            growth *= max(1.0, _growth(step))
            if growth > MAX_GROWTH:
                raise CheckpointError(
                    f"{path}: {chain} may make a text more than {MAX_GROWTH} times as long; "
                    "allowed: fewer steps, shorter replacements"
                )


def _steps(part: object) -> Iterator[Mapping[str, object]]:
    """Yield a chain's steps in any order, with nested sequences flattened."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Mapping):
            continue
        yield step
        for key in _MEMBERS:
            members = step.get(key)
            waiting += members if isinstance(members, list) else []


def _growth(step: Mapping[str, object]) -> float:
    """Return a step's approximate worst-case growth factor."""
    kind = step.get("type")
    if kind == "Replace":
        pattern = step.get("pattern")
        plain = pattern.get("String") if isinstance(pattern, Mapping) else None
        return _bytes_in(step.get("content")) / max(1, _bytes_in(plain))
    if kind == "Prepend":
        return 1.0 + _bytes_in(step.get("prepend"))
    if kind == "Metaspace":
        return float(_bytes_in(step.get("replacement")))
    if kind == "ByteLevel":
        return 2.0
    if kind == "Precompiled":
        return float(_PRECOMPILED_GROWTH)
    if kind == "TemplateProcessing":
        return float(_pieces(step))
    return 1.0


def _bytes_in(text: object) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0


def _pieces(step: Mapping[str, object]) -> int:
    """Return the number of ids and texts in a template."""
    single, specials = step.get("single"), step.get("special_tokens")
    widest = 1
    for entry in specials.values() if isinstance(specials, Mapping) else ():
        ids = entry.get("ids") if isinstance(entry, Mapping) else None
        widest = max(widest, len(ids) if isinstance(ids, list) else 1)
    return widest * len(single) if isinstance(single, list) else 1


def _check_charsmap(encoded: object, path: Path) -> None:
    """Check SentencePiece's character table. It begins with its first part's size."""
    try:
        table = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
    except (binascii.Error, ValueError):
        return  # rejected by the library
    if len(table) < 4 or int.from_bytes(table[:4], "little") > len(table) - 4:
        raise CheckpointError(
            f"{path}: precompiled_charsmap is cut short or corrupt; allowed: a complete table"
        )
