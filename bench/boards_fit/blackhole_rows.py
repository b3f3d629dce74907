"""Published decode speeds of Blackhole boards as samples: rows, sizes of their models, programs."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.devices import get_device
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent.lower.graph import lower_program
from tilewright.compiler.targets.tenstorrent.perf.blackhole import (
    BlackholeConstants,
    blackhole_seconds,
)
from tilewright.compiler.targets.tenstorrent.perf.work import (
    COLLECTIVE,
    InstructionCost,
    program_work,
)
from tilewright.compiler.tracer import trace
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import RopeConfig
from tilewright.models.shapes import SHAPES

ROWS = Path(__file__).with_name("blackhole_published.json")

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}
_GEMMA3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "rms_norm_eps": 1e-6,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
}
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sized(base: Mapping[str, Any], *sizes: int, **more: Any) -> dict[str, Any]:
    return {**base, **dict(zip(_SIZES, sizes, strict=True)), **more}


MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-8B-Instruct": SHAPES["llama-3.1-8b"],
    "Llama-3.3-70B-Instruct": SHAPES["llama-3.1-70b"],
    "Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64),
    "gemma-3-12b-it": _sized(_GEMMA3, 3840, 15360, 48, 16, num_key_value_heads=8, head_dim=256),
    "gemma-3-27b-it": _sized(_GEMMA3, 5376, 21504, 62, 32, num_key_value_heads=16, head_dim=128),
    "Qwen3-Coder-30B-A3B": SHAPES["qwen3-30b-a3b"],
    "Qwen3.6-27B": {
        **_sized(_QWEN3, 5120, 17408, 64, 24, num_key_value_heads=4),
        **{"model_type": "qwen3_5_text", "vocab_size": 248320, "head_dim": 256},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 48},
        "max_position_embeddings": 262144,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    },
}
"""Configurations of the published models. Qwen3.8-27B has the sizes of Qwen3.6-27B."""
_ALIASES = {"Qwen3.8-27B": "Qwen3.6-27B"}

DEVICES = {"p150x2": "p300", "p150x4": "qb2", "p300x2": "qb2", "p150x8": "loudbox"}


@dataclass(frozen=True, slots=True)
class BlackholeSample:
    """A published decode step or first token: ``seconds``, software, and work with its counts."""

    id: int
    model: str
    board: str
    batch: int
    context: int
    date: str
    software: str
    seconds: float
    is_decode: bool
    work: tuple[tuple[InstructionCost, float], ...]

    def predict(self, constants: BlackholeConstants) -> float:
        """Return the seconds of the time model."""
        total = 0.0
        for work, count in self.work:
            start, moved, computed = blackhole_seconds(
                work, constants, self.software, is_decode=self.is_decode
            )
            busy = moved + computed if work.kind == COLLECTIVE else max(moved, computed)
            total += count * (start + busy)
        return total

    def error(self, constants: BlackholeConstants) -> float:
        """Return predicted over published time, less 1."""
        return self.predict(constants) / self.seconds - 1


def read_blackhole_samples(path: Path = ROWS) -> list[BlackholeSample]:
    """Return the rows of the data file: decode steps, then first tokens, all with their work."""
    graphs: dict[tuple[str, str], Any] = {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    steps = [_sample(item, graphs, is_decode=True) for item in rows]
    prompts = [item for item in rows if "first_token_ms" in item]
    return [*steps, *(_sample(item, graphs, is_decode=False) for item in prompts)]


def _sample(
    sample: Mapping[str, Any], graphs: dict[tuple[str, str], Any], *, is_decode: bool
) -> BlackholeSample:
    model = _ALIASES.get(sample["model"], sample["model"])
    board = DEVICES.get(sample["board"], sample["board"])
    precision = load_precision(sample["precision"])
    config = config_of_hf(dict(MODELS[model]), where=model)
    key = model, precision.resolve(config.num_layers, model).id
    if key not in graphs:
        graphs[key] = _graph(config, precision, model)
    graph, pattern = graphs[key]
    mesh = Mesh(sample.get("chips", get_device(board).num_chips))
    context = sample["isl"] + (sample.get("osl", 200) // 2 if is_decode else 0)
    program = lower_program(
        copy.deepcopy(graph),
        device=board,
        mesh=mesh,
        phase="decode" if is_decode else "prefill",
        batch=sample["batch"] if is_decode else 1,
        length=1 if is_decode else sample["isl"],
        context=context,
    )
    repeats = config.num_layers / pattern
    counts: Counter[InstructionCost] = Counter()
    for item, work in zip(program.instructions, program_work(program), strict=True):
        counts[work] += 1 if item.layer is None else repeats  # type: ignore[assignment]
    return BlackholeSample(
        id=sample["id"],
        model=sample["model"],
        board=sample["board"],
        batch=sample["batch"],
        context=context,
        date=sample["date"],
        software=sample["software"],
        seconds=sample["step_ms" if is_decode else "first_token_ms"] / 1e3,
        is_decode=is_decode,
        work=tuple(counts.items()),
    )


def _graph(config: Any, precision: Any, model: str) -> tuple[Any, int]:
    """Return the passes' graph of shallow period of layers, and the number of its layers."""
    import torch

    kinds = getattr(config, "linear_layers", ()) or config.windows or (0,)
    pattern = next(n for n in (1, 4, 6) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    changes: dict[str, Any] = {"num_layers": pattern, "tie_embeddings": False}
    for name in ("linear_layers", "windows"):
        if getattr(config, name, ()):
            changes[name] = getattr(config, name)[:pattern]
    rope = RopeConfig(theta=config.rope.theta, num_rotated=config.rope.num_rotated)
    shallow = dataclasses.replace(config, rope=rope, **changes)
    with torch.device("meta"):
        module: Any = architecture_of(config.model_type).model(shallow)
        graph = trace(module)
    resolved = precision.resolve(pattern, model)
    for stage in get_target("p150").stages():
        run_passes(graph, stage.passes, PassContext(resolved), verify=stage.verify)
    return graph, pattern
