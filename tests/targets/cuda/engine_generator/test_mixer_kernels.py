"""The kernels of experts and linear attention in generated engines: on a GPU as they run, in
Triton's interpreter without one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.engine_generator.parts import cuda_steps as mixer_cuda
from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_steps import (
    Captured,
    HybridCudaExecutor,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.engine import Engine
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    DeltaRule,
    Embed,
    Experts,
    GatedAttend,
    Gather,
    HybridPlan,
    Linear,
    Norm,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import (
    HYBRID_CONFIG,
    HybridReference,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import (
    error_of,
    random_weights,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    HybridSettings,
    read_hybrid_settings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import load_weights

PARTS = "tilewright.compiler.targets.cuda.engine_generator.parts"
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    **HYBRID_CONFIG,
    **{"vocab_size": 37, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    **{"partial_rotary_factor": 0.5, "max_position_embeddings": 96},
    **{"layer_types": ["linear_attention", "full_attention"]},
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 3},
    **{"num_experts": 5, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16},
}

EXPERTS = (
    Norm(out="normed", x="x", weight="post_attention_layernorm.weight"),
    Linear(out="logits", x="normed", weights=("mlp.gate.weight", "mlp.shared_expert_gate.weight")),
    Linear(
        out="inner",
        x="normed",
        weights=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        swiglu=True,
    ),
    Linear(out="shared", x="inner", weights=("mlp.shared_expert.down_proj.weight",)),
    Experts(
        out="x",
        x="normed",
        logits="logits",
        shared="shared",
        gates_ups="mlp.experts.gate_up_proj",
        downs="mlp.experts.down_proj",
    ),
)
PLAN = HybridPlan(
    first=(Embed(out="x", table="embed_tokens.weight"),),
    layer=(
        Linear(
            out="qkv",
            x="x",
            weights=tuple(f"self_attn.{name}_proj.weight" for name in ("q", "k", "v", "gate")),
            norm="input_layernorm.weight",
        ),
        GatedAttend(
            out="heads",
            x="qkv",
            q_norm="self_attn.q_norm.weight",
            k_norm="self_attn.k_norm.weight",
        ),
        Linear(out="x", x="heads", weights=("self_attn.o_proj.weight",), residual=True),
        *EXPERTS,
    ),
    linear_layer=(
        Linear(
            out="mixed",
            x="x",
            weights=tuple(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "a", "b")),
            norm="input_layernorm.weight",
        ),
        DeltaRule(
            out="heads",
            x="mixed",
            convolution="linear_attn.conv1d.weight",
            a_log="linear_attn.A_log",
            dt_bias="linear_attn.dt_bias",
            norm="linear_attn.norm.weight",
        ),
        Linear(out="x", x="heads", weights=("linear_attn.out_proj.weight",), residual=True),
        *EXPERTS,
    ),
    last=(
        Gather(out="last", x="x"),
        Linear(out="logits", x="last", weights=("lm_head.weight",), norm="norm.weight"),
    ),
)


def large_weights(settings: HybridSettings, folder: Path, factor: float) -> dict[str, torch.Tensor]:
    """Random weights, all but the norms' times ``factor``, so that every part counts; they are
    saved in a folder and loaded from it.
    """
    weights = random_weights(settings, 0)
    for name in weights:
        weights[name] = weights[name] * (factor if "norm" not in name else 1)
    torch.save(weights, folder / "model.pt")
    return load_weights(str(folder), settings)


class Interpreted(HybridCudaExecutor):
    """Steps launched one by one."""

    def _captured(self, kind: str, size: int, splits: int) -> Captured:
        inputs = torch.zeros(3, size, dtype=torch.int64)
        inputs[1] = -1
        graph: Any = None
        return Captured(graph, inputs, inputs)

    def _replay(self, found: Captured) -> torch.Tensor:
        return self._run_decode(found.inputs, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs what it compiles")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of rows of padding, which hold anything
def test_kernels_have_the_references_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few pairs, each with its own weights, then more of them, by expert; more slots than at
    first, and rows of padding.
    """
    for part in ("pages", "cuda_steps", "launches"):
        monkeypatch.setattr(f"{PARTS}.{part}.PAGE", 32)
    monkeypatch.setattr(f"{PARTS}.cuda_steps.NUM_SLOTS", 2)
    monkeypatch.setattr(f"{PARTS}.steps.PLAN", PLAN)
    exact = read_hybrid_settings(TINY, CPU)
    tensors = large_weights(exact, tmp_path, 4)
    half = dataclasses.replace(exact, dtype=torch.float16)
    engine = Engine(Interpreted(tensors, half, CPU), half)
    reference = HybridReference(tensors, exact, CPU)

    def same(method: str, ids: list[int], given: Any) -> None:
        ours, theirs = (getattr(each, method)(ids, given) for each in (engine, reference))
        assert error_of(ours, theirs) < 0.3

    def prompts(*lengths: int) -> list[torch.Tensor]:
        return [torch.randint(0, 37, (length,)) for length in lengths]

    torch.manual_seed(1)
    same("prefill", [4, 9], prompts(11, 1))
    same("decode", [9, 4], torch.tensor([5, 6]))
    monkeypatch.setattr(mixer_cuda, "MAX_SMALL_PAIRS", 3)
    same("prefill", [7], prompts(3))
    same("decode", [7, 4, 9], torch.tensor([7, 8, 1]))
    same("prefill", [4], prompts(2))
    same("decode", [4, 7], torch.tensor([2, 3]))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "wide heads"])
def test_a_gpu_has_the_references_logits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    config = {**HYBRID_CONFIG, **(wide if name == "wide heads" else {})}
    monkeypatch.setattr(f"{PARTS}.steps.PLAN", PLAN)
    device = torch.device("cuda")
    settings = read_hybrid_settings(config, device)
    torch.save(random_weights(settings, 0), tmp_path / "model.pt")
    tensors = load_weights(str(tmp_path), settings)
    engine = Engine(HybridCudaExecutor(tensors, settings, device), settings)
    from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import compare

    reference = HybridReference(tensors, settings, device)
    assert compare(engine, reference, settings, seed=0, operations=60)[0] < 1
