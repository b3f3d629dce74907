"""Tiny models with heads and columns for up to eight ranks, and what groups make of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from tests.tiny import lowered, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.driver import compile_virtual
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.passes.sharding.shard import shard
from tilewright.compiler.passes.sharding.slice_rank import slice_rank
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.distributed.parallel import ParallelConfig
from tilewright.models.config import DeltaShape, RopeConfig

VOCABULARY = 131
COUNTS = (2, 3, 4, 8)
_SIZES: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "num_heads": 8, "num_kv_heads": 4, "intermediate_size": 72},
}
_SPARSE: dict[str, Any] = {"num_experts": 6, "experts_per_token": 2, "expert_size": 64}
_HYBRID: dict[str, Any] = {
    **{"num_layers": 2, "linear_layers": (True, False), "delta": DeltaShape(8, 16, 8, 12, 4)},
    **{"rope": RopeConfig(theta=1e7, num_rotated=8)},
}
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"num_kv_heads": 2},
    "phi3": {"num_kv_heads": 8, "tie_embeddings": False},
    "gemma3_text": {"windows": (5, 0), "query_scale": 16.0, "logit_cap": 2.0},
    "qwen3_moe": _SPARSE,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, **_SPARSE, "shared_size": 64},
    "qwen3_next": {**_HYBRID, **_SPARSE, "shared_size": 64},
    "glm4_moe": {**_SPARSE, "shared_size": 64, "num_layers": 2, "dense_layers": (0,)},
    "lfm2": {"num_layers": 2, "conv_layers": (0,), "hidden_size": 64},
}
BIASES = {"attention_bias": True, "output_bias": True, "mlp_bias": True}


def make(model_type: str = "llama", **changes: Any) -> SimpleNamespace:
    """A tiny model of an architecture."""
    return tiny_model(
        std=0.1, model_type=model_type, **{**_SIZES, **ARCHITECTURES[model_type], **changes}
    )


def dealt(
    model: SimpleNamespace,
    parallel: ParallelConfig,
    *,
    rank: int | None = None,
    precision: PrecisionConfig | None = None,
) -> tuple[GraphModule, PassContext]:
    """The graph that `shard` deals, or the part of it that `slice_rank` makes of it."""
    graph_module, ctx = lowered(
        model, target="reference", until="round_activations", precision=precision
    )
    ctx.parallel, ctx.rank = parallel, rank or 0
    run_passes(graph_module, [shard] if rank is None else [shard, slice_rank], ctx)
    return graph_module, ctx


def grouped(model: SimpleNamespace, parallel: ParallelConfig, **options: Any) -> Compiled:
    """All ranks of a group on the reference target."""
    chosen = CompileOptions(max_batch=2, max_context=32, parallel=parallel)
    return compile_virtual(model, precision_of(**options), options=chosen)


def logits_of(model: SimpleNamespace, parallel: ParallelConfig, **options: Any) -> Tensor:
    """Logits of nine positions: a piece of a prompt, one decoded token, and the rest."""
    tokens = random_tokens(9, vocab_size=model.config.vocab_size)
    return prefill(grouped(model, parallel, **options).executable, tokens, (4, 1))


def assert_equal(found: Tensor, expected: Tensor) -> None:
    """Equal to 1e-5 of the largest value, which float32 sums in another order keep."""
    limit = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=limit, rtol=1e-5)
