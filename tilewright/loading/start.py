"""Checkpoints in the start index: find a path's record, keep a model's record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewright.compiler.artifacts.manifest import FileFacts, ModelFacts
from tilewright.compiler.artifacts.start import (
    Start,
    StartIndex,
    StartProgram,
    StartRecord,
    choice_key,
)
from tilewright.models import FoundModel, ShapeName, model_files, quantised_types

if TYPE_CHECKING:
    from tilewright.compiler.precision import PrecisionConfig
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.loading.source import ModelHandle


def find_start(path: FoundModel, *, max_bytes: int = 0) -> Start | None:
    """Return a checkpoint's record, or None. ``max_bytes``: see `StartIndex.key_of`.

    Raises:
        DamagedStartError: a file of the index is damaged.
    """
    if isinstance(path, ShapeName):
        return None
    index = StartIndex.default()
    key = index.key_of(path.name, model_files(path), max_bytes=max_bytes)
    return None if key is None else index.find(key)


def keep_start(
    source: ModelHandle,
    precision: PrecisionConfig,
    program: StartProgram,
    target: str,
    options: CompileOptions,
) -> None:
    """Add a cached program to its checkpoint's record."""
    path, model, index = source.path, source.checkpoint_model(), StartIndex.default()
    if isinstance(path, ShapeName):
        return
    key = index.key_of(path.name, model_files(path), max_bytes=1 << 62)
    if key is None:
        return
    contexts = model.config.contexts

    def make() -> tuple[StartRecord, bytes]:
        facts = ModelFacts(
            source.name, source.content_hash, source.num_layers, source.max_positions
        )
        record = StartRecord(
            model=facts,
            num_parameters=sum(each.numel() for each in model.module.parameters()),
            stored_types=quantised_types(path),
            contexts=contexts,
            tokenizer=FileFacts(0, ""),
        )
        return record, source.tokenizer.mapped_bytes()

    choice = choice_key(precision, contexts, target=target, options=options)
    index.keep(key, make, choice, program)
