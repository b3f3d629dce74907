"""Kernels of whole steps by model, format, arithmetic, compute capability and rows: a golden text.

The kernels are recorded, not run.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from tests.targets.cuda.recorded import (
    FORMATS,
    LAYERS,
    Launches,
    plan_of,
    recorded_gpu,
    rows_of,
    runs,
    steps_of,
)
from tests.targets.cuda.test_architectures_cuda import SHAPES as ON_CUDA
from tests.targets.cuda.test_architectures_cuda import SMALL
from tests.tiny import check_golden, precision_of, tiny_model
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.program.instructions import (
    ExpertLinearOp,
    ExpertSum,
    Instruction,
    TopKRouteOp,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES

MODELS = {
    **dict.fromkeys(("llama-3.1-8b", "qwen3.5-35b-a3b"), ("bf16", "bfp8", "bfp4")),
    **dict.fromkeys(("llama-3.2-1b", "qwen3-8b", "qwen3-30b-a3b"), ("bf16",)),
    **dict.fromkeys(("tiny", "tiny-hybrid"), ("bf16", "bfp8")),
}
HOW: dict[str, dict[str, Any]] = {
    "fast": {},
    "strict": {"strict_rows": 16},
    "exact": {"exact": True},
}
DECODES = (*range(1, 35), 48, 63, 64, 65, 96, 128, 129, 200, 256)
PROMPTS = (
    1,
    2,
    3,
    4,
    5,
    8,
    16,
    17,
    32,
    33,
    64,
    65,
    128,
    129,
    256,
    257,
    384,
    512,
    513,
    768,
    1024,
    2048,
    2049,
    4096,
    4097,
    8704,
    8705,
)
GOLDEN_DECODES = (1, 2, 5, 17, 33, 65, 256)
GOLDEN_PROMPTS = (1, 65, 513, 2049)


def selections(steps: StepRunner, launches: Launches, *counts: Sequence[int]) -> Iterator[str]:
    """Yield a line for every range of rows with the same kernels."""
    found: list[tuple[str, int, str, list[int]]] = []
    for what, count, call in runs(steps, *counts):
        launches.clear()
        call()
        shown = launches.shown()
        if not found or found[-1][0] != what or found[-1][2] != shown:
            found.append((what, count, shown, []))
        found[-1][3].append(launches.checksum)
    for what, count, shown, checksums in found:
        yield f"  {what} | {count}: {shown} | {sum(checksums) % (1 << 32):08x}"


def case(
    patch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    model: str,
    kind: str,
    how: str,
    *counts: Sequence[int],
) -> list[str]:
    """Return the text of a model in a format, with an arithmetic."""
    config = config_of_hf({**SHAPES[model], **LAYERS[model]}, where=model)
    plan = plan_of(config, precision_of(kind, **FORMATS[kind]))
    with recorded_gpu(patch, capability) as launches:
        steps = steps_of(plan, max_rows=256, max_context=4096, **HOW[how])
        title = f"{model} {kind} {how} {capability[0]}.{capability[1]}"
        return [title, *selections(steps, launches, *counts)]


def test_steps_select_the_kernels_of_the_golden_text(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (
        *(((9, 0), model, "bf16", "fast") for model in ("llama-3.1-8b", "qwen3.5-35b-a3b")),
        ((9, 0), "llama-3.1-8b", "bfp8", "strict"),
        ((9, 0), "qwen3.5-35b-a3b", "bfp4", "fast"),
        ((9, 0), "tiny-hybrid", "bf16", "exact"),
        ((8, 9), "tiny-hybrid", "bfp8", "fast"),
    )
    text = [
        line for each in cases for line in case(monkeypatch, *each, GOLDEN_DECODES, GOLDEN_PROMPTS)
    ]
    check_golden("cuda/op_kernels.txt", "\n".join(text) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(9, 0), (8, 9)], ids=["90", "89"])
def test_steps_select_the_kernels_of_the_checksums(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All formats, arithmetics and rows."""
    found = []
    for model, kinds in MODELS.items():
        for kind, how in product(kinds, HOW):
            text = case(monkeypatch, capability, model, kind, how, DECODES, PROMPTS)
            found.append(
                f"{text[0]}: {len(text) - 1} ranges, {zlib.crc32(repr(text).encode()):08x}"
            )
    check_golden(f"cuda/op_kernels_{capability[0]}{capability[1]}.txt", "\n".join(found) + "\n")


@pytest.mark.parametrize("capability", [(9, 0), (8, 9)], ids=["90", "89"])
def test_gpt_oss_has_kernels_for_its_stored_experts(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MXFP4 experts with biases and a clamp use CUDA C++. Other GPUs use Triton."""
    config = config_of_hf({**SHAPES["gpt-oss-20b"], "num_hidden_layers": 2}, where="gpt-oss")
    plan = plan_of(config, precision_of("bf16", experts_ff1_3="bfp8", experts_ff2="bfp8"))
    plan = replace(plan, instructions=(*map(with_mxfp4, plan.instructions),))
    with recorded_gpu(monkeypatch, capability) as launches:
        steps = steps_of(plan, max_rows=256, max_context=4096)
        for count in (1, 2, 3, 8, 32, 33, 64, 65, 256, None):
            launches.clear()
            if count is None:
                steps.prefill(rows_of(64), logit_rows=None, from_start=True)
            else:
                steps.decode(rows_of(count), reach=steps.attention.reaches[0], captured=True)
            found = [name for name in launches.kernels if re.search("expert(_|s_mx)", name)]
            if capability == (8, 9):
                assert len(found) == 4 and all("KIND=mxfp4" in name for name in found)
            elif count is None or count > 32:
                assert found == 4 * ["gemm_experts:gemm_experts_mxfp4_4"]
            elif count <= 2:
                names = "expert_linear_small_mxfp4_8", "expert_sum_small_mxfp4_4"
                assert found == 2 * [f"moe_small:{name}" for name in names]
            else:
                names = "expert_linear_mxfp4_3", "expert_sum_mxfp4_3"
                assert found == 2 * [f"experts:{name}" for name in names]


def test_a_router_with_a_bias_leaves_decode_steps_to_the_kernels_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of_hf({**SHAPES["qwen3-30b-a3b"], "num_hidden_layers": 1}, where="qwen")
    plan = plan_of(config, precision_of("bf16", experts_ff1_3="bfp8", experts_ff2="bfp8"))
    plan = replace(plan, instructions=(*map(with_router_bias, plan.instructions),))
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        steps = steps_of(plan, max_rows=64, max_context=4096)
        for count in (1, 8, 64):
            launches.clear()
            steps.decode(rows_of(count), reach=steps.attention.reaches[0], captured=True)
            assert launches.shown().count("gemm_experts:gemm_experts_bfp8_4") == 2
        note = "experts in gemm_experts.cu (a bias in the selection of experts)"
        assert steps.kernels() == f"CUDA C++ kernels, but {note}"


@pytest.mark.parametrize("how", ["fast", "strict", "exact"])
def test_other_gpus_need_no_kernel_of_hopper(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No CUDA C++ is loaded or launched, and no tile is fetched by a descriptor."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("CUDA C++")

    for model_type, changes in {"llama": {}, **ON_CUDA}.items():
        size = {"hidden_size": 16, **SMALL, **changes}
        config = tiny_model(model_type=model_type, **size).config
        plan = plan_of(config, precision_of("bf16"))
        with recorded_gpu(monkeypatch, (8, 9)) as launches, monkeypatch.context() as patch:
            patch.setattr(nvrtc, "load", refuse)
            patch.setattr(nvrtc, "launch", refuse)
            steps = steps_of(plan, max_rows=256, max_context=1024, **HOW[how])
            for _, _, call in runs(steps, (1, 17, 256), (1, 513)):
                call()
        assert launches.kernels and not any("large" in name for name in launches.kernels)


def test_an_expert_sum_with_a_bias_takes_the_result_of_a_shared_expert(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No architecture has both. The shared expert uses its own matmuls."""
    config = config_of_hf({**SHAPES["qwen3.5-35b-a3b"], "num_hidden_layers": 1}, where="qwen")
    plan = plan_of(config, precision_of("bf16"))
    plan = replace(plan, instructions=(*map(with_bias, plan.instructions),))
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        steps = steps_of(plan, max_rows=64, max_context=4096)
        for count in (1, 64):
            launches.clear()
            steps.decode(rows_of(count), reach=steps.attention.reaches[0], captured=True)
            assert launches.shown().count("expert_sum_bf16") == 1


def with_bias(each: Instruction) -> Instruction:
    if not isinstance(each, ExpertSum):
        return each
    num_experts, num_rows, _ = each.weight.shape
    recipe = WeightRecipe((Segment("bias", num_experts * num_rows),), (num_experts, num_rows, 1))
    return replace(each, bias=recipe)


def with_router_bias(each: Instruction) -> Instruction:
    if not isinstance(each, TopKRouteOp):
        return each
    recipe = WeightRecipe((Segment("bias", each.num_experts),), (each.num_experts,))
    return replace(each, bias=recipe)


def with_mxfp4(each: Instruction) -> Instruction:
    """Only a file selects this format."""
    if not isinstance(each, ExpertLinearOp | ExpertSum):
        return each
    return replace(each, weight=each.weight.with_format("mxfp4", "in"))
