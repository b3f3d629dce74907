"""An opened model: a checkpoint, random weights, or a compiled directory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.artifacts.folder import open_folder
from tilewright.compiler.artifacts.loading import load_encoder
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.paths import digest_memory, is_compiled, part_of
from tilewright.compiler.artifacts.start import Start
from tilewright.compiler.precision import PrecisionConfig, PrecisionSummary
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.errors import CheckpointError, RequestError
from tilewright.images.squares import AnyProcessor
from tilewright.models import (
    FoundModel,
    LoadedModel,
    ShapeName,
    Weights,
    load_model,
    quantised_types,
)
from tilewright.models.checkpoints.calibrated.manifest import is_calibrated, read_manifest
from tilewright.models.tokenizer.load import load_mapped
from tilewright.models.tokenizer.saved import read_saved
from tilewright.models.tokenizer.tokenizer import Tokenizer

TOKENIZER = "tokenizer"
"""Name of the directory with tokenizer files in a compiled directory."""


@dataclass(frozen=True, slots=True)
class ModelHandle:
    """An opened model, from a checkpoint (``load``) or a compiled directory (``manifest``).

    Attributes:
        load: builds the checkpoint's model, once.
        start: the model's record in the start index.
        notes: lines for the user.
        original: checkpoint for the fp32 accuracy reference. None: this model.
    """

    name: str
    content_hash: str
    num_layers: int
    max_positions: int
    tokenizer: Tokenizer
    path: FoundModel
    weights: Weights
    load: Callable[[], LoadedModel] | None = None
    manifest: Manifest | None = None
    start: Start | None = None
    notes: tuple[str, ...] = ()
    original: ModelHandle | None = None

    @property
    def calibration(self) -> tuple[str, str]:
        """Method with text, and the original's hash. Empty: the weights are not calibrated."""
        if self.manifest is not None:
            return self.manifest.model.calibration, self.manifest.model.original
        if isinstance(self.path, ShapeName) or not is_calibrated(self.path):
            return "", ""
        facts = read_manifest(self.path).facts
        return facts.text_line, facts.original

    @property
    def model(self) -> LoadedModel | None:
        """The checkpoint's model, built at the first access. None for a directory."""
        return None if self.load is None else self.load()

    def checkpoint_model(self) -> LoadedModel:
        """Build the checkpoint's model. Weights are loaded on demand.

        Raises:
            CheckpointError: for a compiled directory.
        """
        if self.load is None:
            raise CheckpointError(
                f"{self.path}: a compiled folder has no checkpoint, and there is no fp32 reference "
                "of its model in the cache; allowed: measure its accuracy once from the checkpoint"
            )
        return self.load()


def open_compiled(path: Path, rank: int) -> ModelHandle:
    """Open a compiled directory, for the program of ``rank``."""
    manifest = open_folder(path, digest_memory(), rank)
    facts = manifest.model
    return ModelHandle(
        name=facts.name,
        content_hash=facts.content_hash,
        num_layers=facts.num_layers,
        max_positions=facts.max_positions,
        tokenizer=read_saved(path / TOKENIZER),
        path=path,
        weights=facts.weights,
        manifest=manifest,
    )


def open_started(path: FoundModel, start: Start) -> ModelHandle:
    """Open a model in the start index. It is built when its weights are needed."""
    facts = start.record.model
    tokenizer = load_mapped(start.tokenizer, Path(str(path)))

    @functools.cache
    def load() -> LoadedModel:
        model = load_model(path, tokenizer=tokenizer)
        if model.checkpoint.content_hash() != facts.content_hash:
            raise CheckpointError(f"{path}: changed while it was opened")
        return model

    return ModelHandle(
        name=facts.name,
        content_hash=facts.content_hash,
        num_layers=facts.num_layers,
        max_positions=facts.max_positions,
        tokenizer=tokenizer,
        path=path,
        weights=facts.weights,
        load=load,
        start=start,
    )


def source_of(model: LoadedModel, path: FoundModel) -> ModelHandle:
    """Wrap a loaded model so that commands can compile and name it."""
    return ModelHandle(
        name=model.name,
        content_hash=model.checkpoint.content_hash(),
        num_layers=model.config.num_layers,
        max_positions=model.config.max_positions,
        tokenizer=model.tokenizer,
        path=path,
        weights=model.weights,
        load=lambda: model,
    )


def precision_of(source: ModelHandle, precision: PrecisionConfig | None) -> PrecisionSummary:
    """Return the requested configuration on this model, or the compiled configuration."""
    if source.manifest is not None:
        return source.manifest.precision
    assert precision is not None
    known = None if source.start is None else source.start.record.precision_of(precision)
    if known is not None:
        return known
    from tilewright.compiler.driver import resolve_precision

    return resolve_precision(source.checkpoint_model(), precision).summary(precision.name)


def precision_title(source: ModelHandle, precision: PrecisionSummary) -> str:
    """Return a configuration's name and formats on this model.

    See `PrecisionSummary.title`. A compiled directory does not know its original file.
    """
    if source.start is not None:
        return precision.title(source.start.record.stored_types)
    is_folder = not isinstance(source.path, ShapeName) and is_compiled(source.path)
    return precision.title(() if is_folder else quantised_types(source.path))


ARITHMETIC = {"always": "strict", "never": "fast", "auto": "auto"}
"""``batch_invariant`` in recorded facts."""


def served_facts(source: ModelHandle, compiled: Compiled, *, invariance: str) -> dict[str, str]:
    """Return the settings by name that determine a compiled model's output."""
    facts = {
        "name": source.name,
        "target": compiled.target,
        "precision": compiled.precision.heading,
        "configuration": precision_title(source, compiled.precision),
        "precision_rule": next((n for n in compiled.notes if n.startswith("precision auto")), ""),
        "weights": source.weights,
        "content_hash": source.content_hash,
        "device": compiled.executable.device_name,
        "arithmetic": ARITHMETIC[invariance],
    }
    if compiled.target == "cuda" and compiled.executable.capabilities.max_drafts:
        # The largest step selects kernels, so the reserved rows change bits.
        facts["max_drafts"] = str(compiled.executable.capabilities.max_drafts)
    if source.load is not None:
        facts["parameters"] = str(num_parameters(source))
    return facts


def image_processor(source: ModelHandle) -> AnyProcessor:
    """Return the model's image processor. A checkpoint of the start index is opened.

    Raises:
        RequestError: The model takes no images.
    """
    if source.manifest is not None:
        folder = Path(str(source.path))
        encoder = load_encoder(folder if source.manifest.group is None else part_of(folder, 0))
        if encoder is not None:
            return encoder.settings.processor
    elif (vision := source.checkpoint_model().vision) is not None:
        return vision.processor
    raise RequestError(f"images: {source.name} takes text only; allowed: text")


def num_parameters(source: ModelHandle) -> int:
    """Return a checkpoint's parameter count."""
    if source.start is not None:
        return source.start.record.num_parameters
    return sum(each.numel() for each in source.checkpoint_model().module.parameters())
