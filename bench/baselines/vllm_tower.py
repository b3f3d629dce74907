"""``python -m bench.baselines.vllm_tower``: vLLM's Qwen3.5 tower with random weights on a GPU.

Gives the tower the same pixels as ``python -m bench images --tower``, in bfloat16, and appends rows
to the same file. It needs an importable vLLM and uses a single GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.common import keeper
from bench.cuda.images import REPEATS, SIDES
from tilewright.errors import ConfigError
from tilewright.images.noise import noise_picture
from tilewright.options.arguments import integer, option, parse

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "NCCL_NVLS_ENABLE": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    shape: str = option("shape with a Qwen3.5 tower", default="qwen3.5-35b-a3b-vision")
    sides: tuple[int, ...] = option(
        "image sides in pixels", default=SIDES, nargs="+", type=integer(1, 4096)
    )
    repeats: int = option(f"repeats ({REPEATS})", default=REPEATS, type=integer(1, 1000))
    results: Path | None = option("append rows, as JSON lines", metavar="FILE", type=Path)


def main(argv: Sequence[str]) -> int:
    """Measure vLLM's tower and print its times. Return 0.

    Raises:
        ConfigError: vLLM is not importable.
    """
    words = "Measure vLLM's Qwen3.5 tower with random weights."
    options = parse(_Options, argv, prog="python -m bench.baselines.vllm_tower", description=words)
    keep = keeper(options.results)
    os.environ.update(_OFFLINE)
    try:
        import vllm
    except ImportError as error:
        raise ConfigError(f"vllm: {error}; allowed: PYTHONPATH with vLLM") from None
    import torch

    from tilewright.compiler.targets.image_encoder import ImageEncoder
    from tilewright.models import load_model

    model: Any = load_model(f"shape:{options.shape}")
    tower = _tower(model.vision.config)
    encoder = ImageEncoder(_settings(model.vision), lambda: tower)
    for side in options.sides:
        times, image = [], model.vision.processor.prepare(noise_picture(side, 0))
        for repeat in range(-1, options.repeats):
            started = time.perf_counter()
            patches, *_ = encoder.inputs(image.height, image.width, image.pixels)
            pixels = torch.from_numpy(patches).cuda().bfloat16()
            patch = model.vision.processor.patch_size
            grid = [[1, image.height // patch, image.width // patch]]
            with torch.inference_mode():
                result = tower(pixels, grid)
            assert len(result) == image.num_tokens, (len(result), image.num_tokens)
            result[-1].float().sum().item()
            if repeat >= 0:
                times.append(1e3 * (time.perf_counter() - started))
        values = {
            **{"engine": f"vLLM {vllm.__version__}", "model": model.name, "weights": "random"},
            **{"precision": "bf16", "device": torch.cuda.get_device_name(), "side": side},
            **{"image_tokens": image.num_tokens, "image_rows": 0, "users": 1, "tower_ms": times},
            "command": "python -m bench.baselines.vllm_tower",
        }
        keep(values)
        print(values, flush=True)
    return 0


def _settings(vision: Any) -> Any:
    from tilewright.compiler.targets.image_encoder import EncoderSettings

    config = vision.config
    return EncoderSettings(
        processor=vision.processor,
        num_frames=config.num_frames,
        grid_side=config.grid_side,
        num_pairs=config.hidden_size // config.num_heads // 2,
        rotary_axes=config.rotary_axes,
    )


def _values(config: Any) -> Mapping[str, Any]:
    """Return the keys of transformers for a tower."""
    return {
        "depth": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "patch_size": config.patch_size,
        "temporal_patch_size": config.num_frames,
        "spatial_merge_size": config.merge_size,
        "num_position_embeddings": config.num_positions,
        "out_hidden_size": config.output_size,
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [],
        "in_channels": 3,
    }


def _tower(config: Any) -> Any:
    """Return vLLM's tower in bfloat16 with random weights, on the GPU."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models.qwen3_vl import Qwen3_VisionTransformer

    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(VllmConfig()), torch.device("cuda"):
        init_distributed_environment(1, 0, "tcp://127.0.0.1:29555", 0, "nccl")
        initialize_model_parallel(1)
        values = SimpleNamespace(**_values(config))
        tower = Qwen3_VisionTransformer(values, norm_eps=1e-6, prefix="visual")
    with torch.no_grad():
        for name, weight in tower.named_parameters():
            weight.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.02)
    return tower.cuda().eval()


if __name__ == "__main__":
    from tilewright.cli.main import report_errors

    sys.exit(report_errors(lambda: main(sys.argv[1:])))
