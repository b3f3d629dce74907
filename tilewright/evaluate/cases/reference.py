"""The fp32 reference for accuracy: tokens, and the fp32 model's predictions after each token.

Predictions are in versioned files, which are refused for a different model, tokenizer or text. Full
logits, for KL, are computed on demand and cached.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Slot, Step
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, ACCURACY_PREFILL
from tilewright.utils.environment import environment
from tilewright.utils.files import read_regular, write_file

NUM_GUESSES = 5
_FOLDER = Path(__file__).parent / "references"


class ReferenceMismatchError(ConfigError):
    """A valid reference file for a different subject."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of a reference. All hashes must be equal."""

    model: str
    model_hash: str
    tokenizer_hash: str
    text_hash: str


@dataclass(frozen=True, slots=True)
class AccuracyReference:
    """A reference for one text.

    Attributes:
        tokens: The text.
        guesses: The five likeliest ids for position ``prefill + i``.
        margins: First logit minus second, by position. It is the prediction's confidence.
        versions: Library versions.
    """

    subject: Subject
    prefill: int
    tokens: tuple[int, ...]
    guesses: tuple[tuple[int, ...], ...]
    margins: tuple[float, ...]
    versions: dict[str, str]

    @property
    def id(self) -> str:
        """Short hash of all fields except the library versions."""
        body = dataclasses.asdict(self)
        del body["versions"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]


def text_tokens(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Return a text's first tokens, as many as an accuracy run needs.

    Raises:
        ConfigError: The text is too short with this tokenizer.
    """
    tokens = encode(text)
    if len(tokens) < ACCURACY_CONTEXT:
        raise ConfigError(
            f"the accuracy text has {len(tokens)} tokens here; allowed: {ACCURACY_CONTEXT} or more"
        )
    return tokens[:ACCURACY_CONTEXT]


def text_hash(tokens: Sequence[int]) -> str:
    """Return a token id hash."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def build_reference(
    executable: Executable, subject: Subject, tokens: Sequence[int]
) -> tuple[AccuracyReference, Tensor]:
    """Return the predictions and all logits ``[predictions, vocab]`` from an fp32 prefill of the
    text.
    """
    executable.reset()
    slot = Slot(0)
    whole = PrefillChunk(slot, 0, tuple(tokens[:-1]), echoes=True)
    opened = (OpenSlot(slot, SamplingParams()),)
    (part,) = executable.step(Step(prompts=(whole,), edits=opened, want_logits=True)).parts
    assert part.logits is not None
    logits = part.logits()[ACCURACY_PREFILL - 1 :].clone()
    executable.reset()
    best = logits.topk(NUM_GUESSES, dim=-1)
    reference = AccuracyReference(
        subject=subject,
        prefill=ACCURACY_PREFILL,
        tokens=tuple(tokens),
        guesses=tuple(tuple(row) for row in best.indices.tolist()),
        margins=tuple(round(float(margin), 5) for margin in best.values[:, 0] - best.values[:, 1]),
        versions=environment(("torch", "tokenizers")).versions,
    )
    return reference, logits


def reference_path(model: str, folder: Path = _FOLDER) -> Path:
    """Return the path of a model's versioned reference. The file may not exist."""
    return folder / f"{_slug(model)}.json"


def reference_bytes(reference: AccuracyReference) -> bytes:
    """Return a reference file's contents."""
    body = {"id": reference.id, **dataclasses.asdict(reference)}
    return (json.dumps(body, separators=(",", ":")) + "\n").encode()


def load_reference(path: Path, subject: Subject) -> AccuracyReference:
    """Read a reference file.

    Raises:
        ReferenceMismatchError: The model, tokenizer or text differs.
        ConfigError: The file is damaged.
    """
    try:
        values = msgspec.json.decode(read_regular(path), type=dict[str, Any])
        stored_id = values.pop("id", None)
        if values.keys() != {field.name for field in dataclasses.fields(AccuracyReference)}:
            raise ValueError("other fields")
        reference = msgspec.convert(values, AccuracyReference)
    except (OSError, ValueError, RecursionError) as error:  # msgspec errors are ValueErrors
        raise ConfigError(f"{path}: not a reference file ({type(error).__name__})") from None
    if reference.id != stored_id:
        raise ConfigError(f"{path}: the reference file is damaged (its id does not match)")
    for field in dataclasses.fields(Subject):
        found, wanted = getattr(reference.subject, field.name), getattr(subject, field.name)
        if found != wanted:
            raise ReferenceMismatchError(
                f"{path}: the reference is of another {field.name.removesuffix('_hash')} "
                f"({_short(found)}); allowed: {_short(wanted)}"
            )
    return reference


def _short(text: str) -> str:
    """Return the beginning of a name or hash for a message."""
    return text[:12] if text.isprintable() else repr(text[:12])


def cached_logits(reference: AccuracyReference) -> Tensor | None:
    """Return a reference's cached fp32 logits, or None."""
    shape = (len(reference.guesses),)
    try:
        # mapped, so that a header with a wrong shape allocates nothing
        stored = np.load(_logits_path(reference), mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None  # absent or cut short
    if stored.dtype == np.float32 and stored.ndim == 2 and stored.shape[:1] == shape:
        return torch.from_numpy(np.array(stored))
    return None


def keep_logits(reference: AccuracyReference, logits: Tensor) -> Tensor:
    """Cache the fp32 logits of a reference and return them."""
    logits = logits.float()
    buffer = io.BytesIO()
    np.save(buffer, logits.numpy())
    write_cache(_logits_path(reference), buffer.getvalue())
    return logits


def _logits_path(reference: AccuracyReference) -> Path:
    return cache_dir() / "references" / f"{_slug(reference.subject.model)}-{reference.id}.npy"


def write_cache(path: Path, data: bytes) -> None:
    """Write a cache file atomically. Errors become a warning."""
    try:
        write_file(path, data)
    except ConfigError as error:
        warnings.warn(f"not kept: {error}", stacklevel=2)


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in ".-_" else "-" for c in name.lower()).strip(".-")
