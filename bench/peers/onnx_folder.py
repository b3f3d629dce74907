"""The model folder that ONNX Runtime GenAI runs, built by its own builder from our weights.

The builder wants a Hugging Face folder: a GGUF checkpoint is written out as one for it.
"""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from bench.peers.worker import cache_name
from tilewright.errors import ConfigError
from tilewright.models.checkpoints.huggingface.config import hf_values
from tilewright.utils.child_process import PYTHON, Child

BUILDER = "onnxruntime_genai.models.builder"
_BUILD = (*PYTHON, "-m", BUILDER)
_CONFIG = "genai_config.json"
_SECONDS = 3600
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def cached_onnx_folder(model: Any, source: Path, *, content_hash: str, folder: Path) -> Path:
    """The int4 folder of a model in a cache folder, built if it is not there.

    Raises:
        ConfigError: where the builder fails, with the last line it said.
    """
    version = metadata.version("onnxruntime-genai")
    path = folder / f"{cache_name(source, content_hash, 'int4', version)}.onnx-int4"
    if (path / _CONFIG).is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "built"
        if not source.is_dir():
            source = Path(scratch) / "source"
            write_hf_folder(model, source)
        build(source, built, scratch=Path(scratch) / "cache")
        try:
            built.replace(path)
        except OSError:
            if not (path / _CONFIG).is_file():  # else another process was faster
                raise
    return path


def build(source: Path, destination: Path, *, scratch: Path) -> None:
    """Run the builder on a Hugging Face folder; it downloads nothing. Raises ConfigError."""
    paths = ("-i", str(source), "-o", str(destination), "-c", str(scratch))
    command = (*_BUILD, *paths, "-p", "int4", "-e", "cpu")
    offline = {"HF_HUB_OFFLINE": "1"}
    with Child(command, timeout_s=_SECONDS, environment=offline, what=BUILDER) as child:
        ended = child.wait()
    assert ended is not None
    if ended.is_timed_out:
        raise ConfigError(f"{BUILDER} took more than {_SECONDS} s")
    if ended.code:
        last = ended.last or ended.how
        missing = "; pip install onnx-ir transformers" if "ModuleNotFoundError" in last else ""
        raise ConfigError(f"{BUILDER} failed: {last[:200]}{missing}")


def write_hf_folder(model: Any, folder: Path) -> None:
    """A loaded model as a new Hugging Face folder, its tensors in float32.

    Raises:
        ConfigError: for a model that ``config.json`` is not written of here.
    """
    from safetensors.torch import save_file

    config = hf_config(model)
    model.tokenizer.save(folder)
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = model.checkpoint
    tensors = {name: checkpoint.get(name).float().contiguous() for name in checkpoint.names}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def hf_config(model: Any) -> dict[str, Any]:
    """The configuration of a loaded model as ``config.json`` holds it.

    Raises:
        ConfigError: for another architecture, scaled rotations, or biases it cannot say.
    """
    config = model.config
    if config.model_type not in _CLASSES:
        raise ConfigError(f"{config.model_type!r} has no export; allowed: {', '.join(_CLASSES)}")
    rope = config.rope
    is_scaled = rope.scaling is not None or rope.freq_factors is not None
    if is_scaled or config.mlp_bias or (config.attention_bias and config.model_type == "llama"):
        raise ConfigError(
            f"{config.name}: scaled rotations or biases are not exported from GGUF; "
            "give the folder with --onnx-genai-folder"
        )
    return {
        "architectures": [_CLASSES[config.model_type]],
        **hf_values(config),
        "rope_theta": rope.theta,
        "hidden_act": "silu",
        "dtype": "float32",
        "bos_token_id": model.tokenizer.bos_id,
        "eos_token_id": list(model.tokenizer.eos_ids) or None,
    }
