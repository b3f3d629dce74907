"""Kernels of made-up steps: told apart by name, added up, and their overlaps not counted twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.cuda import kernel_profile
from bench.cuda.kernel_profile import (
    ATTENTION,
    CHOOSE,
    COPY,
    DEQUANTISE,
    EMBEDDING,
    NORM,
    OTHER,
    PRODUCT,
    Launch,
    Line,
    assign_parts,
    part_of,
    profile_decode,
    profile_prompt,
    profile_steps,
    short_name,
)
from tests.tiny import compiled, tiny_model
from tilewright.evaluate.measure.timing import Job
from tilewright.runtime.request import SamplingParams

SPLIT_K = "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)"


@pytest.mark.parametrize(
    ("name", "part", "shown"),
    [
        ("_embed_kernel", EMBEDDING, "_embed_kernel"),
        ("gemv_bf16_3", PRODUCT, "gemv_bf16_3"),
        ("gemm_bfp8_4_1_3", PRODUCT, "gemm_bfp8_4_1_3"),
        ("_linear_kernel", PRODUCT, "_linear_kernel"),
        ("expert_linear_bf16_4", PRODUCT, "expert_linear_bf16_4"),
        ("_expert_linear_large_kernel", PRODUCT, "_expert_linear_large_kernel"),
        ("expert_sum_bfp8_3", PRODUCT, "expert_sum_bfp8_3"),
        ("nvjet_tst_128x8_64x12_4x1_v_bz_TNT", PRODUCT, "nvjet_tst_128x8_64x12_4x1_v_bz_TNT"),
        ("void cutlass::Kernel2<cutlass_80_wmma>(Params)", PRODUCT, "Kernel2"),
        ("_attend_decode_kernel", ATTENTION, "_attend_decode_kernel"),
        ("void pytorch_flash::flash_fwd_kernel<cutlass::bf16>(P)", ATTENTION, "flash_fwd_kernel"),
        (
            "cudnn_generated_fort_native_sdpa_sm90",
            ATTENTION,
            "cudnn_generated_fort_native_sdpa_sm90",
        ),
        ("rms_norm", NORM, "rms_norm"),
        ("_rms_norm_kernel", NORM, "_rms_norm_kernel"),
        ("_partial_kernel", CHOOSE, "_partial_kernel"),
        ("_bfp8_kernel", DEQUANTISE, "_bfp8_kernel"),
        ("_swiglu_kernel", OTHER, "_swiglu_kernel"),
        ("Memcpy DtoH (Device -> Pinned)", COPY, "Memcpy DtoH (Device -> Pinned)"),
        (
            "void at::native::(anonymous namespace)::elementwise<4, gemm<int>>(int)",
            OTHER,
            "elementwise",
        ),
        ("a" * 60, OTHER, "a" * 45 + "..."),
    ],
)
def test_a_kernel_s_part_is_in_its_name(name: str, part: str, shown: str) -> None:
    assert (part_of(name), short_name(name)) == (part, shown)


def test_products_take_the_groups_in_order_with_their_sums() -> None:
    names = ["rms_norm", "nvjet_a", SPLIT_K, "_attend_decode_kernel", "gemv_bf16_3"]
    parts, is_mapped = assign_parts(names, ["wqkv", "wo"])
    assert is_mapped and parts == [NORM, "wqkv", "wqkv", ATTENTION, "wo"]
    parts, is_mapped = assign_parts(names, ["wqkv"])
    assert not is_mapped and parts == [NORM, PRODUCT, PRODUCT, ATTENTION, PRODUCT]


def step(start: float) -> list[Launch]:
    """50 us: the second kernel starts early and waits; then 5 us in which nothing runs."""
    return [
        Launch("_embed_kernel", start, start + 10),
        Launch("gemv_bf16_3", start + 5, start + 30),
        Launch("gemv_bf16_3", start + 28, start + 40),
        Launch("_attend_decode_kernel", start + 45, start + 50),
    ]


def lines(found: tuple[Line, ...]) -> dict[str, tuple[float, float, float]]:
    return {line.name: (line.launches, line.own, line.durations) for line in found}


def test_an_expert_of_all_tokens_may_run_along_with_the_others() -> None:
    groups = ["router", "experts_ff1_3", "shared_ff1_3", "shared_ff2", "experts_ff2", "lm_head"]
    names = ["gemv_bf16_0_3", "route_8", "expert_linear_bf16_4", "expert_sum_bf16_4", "gemv"]
    parts, is_mapped = assign_parts(names, groups)
    assert is_mapped
    assert parts == ["router", OTHER, "experts_ff1_3", "experts_ff2", "lm_head"]
    joined = assign_parts(["router_4", *names[2:4], "dense_bf16_4_2"], groups)
    assert joined == (["router", "experts_ff1_3", "experts_ff2", "lm_head"], True)
    assert assign_parts([*names, "gemv", "gemv"], groups)[1]
    assert not assign_parts([*names, "gemv"], groups)[1]


def test_own_times_and_gaps_are_the_step() -> None:
    before, cut_off = [Launch("gemv_bf16_3", 0, 90)], step(200)[:2]
    launches = [*before, *step(100), *step(150), *cut_off]
    found = profile_steps(launches, ["wqkv", "wo"])
    assert found is not None and found.is_mapped
    assert (found.num_steps, found.step, found.idle) == (2, 50.0, 5.0)
    assert lines(found.parts) == {
        "wqkv": (1, 20, 25),
        EMBEDDING: (1, 10, 10),
        "wo": (1, 10, 12),
        ATTENTION: (1, 5, 5),
    }
    assert lines(found.kernels)["gemv_bf16_3"] == (2, 30, 37)
    assert [line.own for line in found.parts] == [20, 10, 10, 5], "the longest first"
    assert sum(line.own for line in found.parts) + found.idle == found.step


def test_other_kernels_than_expected_are_said_not_to_be_told_apart() -> None:
    found = profile_steps([*step(0), *step(50)], ["wqkv"])
    assert found is not None and not found.is_mapped
    assert lines(found.parts)[PRODUCT] == (2, 30, 37)


def test_no_whole_step_is_no_profile() -> None:
    assert profile_steps(step(0), ["wqkv", "wo"]) is None
    assert profile_steps([], []) is None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Instead of a profiler: how many steps were run while it would have recorded."""
    counts: list[int] = []

    def record(run: Callable[[], None]) -> list[Launch]:
        before = len(steps)
        run()
        counts.append(len(steps) - before)
        return [launch for index in range(counts[-1]) for launch in step(50.0 * index)]

    from tilewright.compiler.targets.null import NullExecutable

    steps: list[int] = []
    original = NullExecutable.step

    def counted(self: Any, given: Any) -> Any:
        if given.decode or given.prompts:
            steps.append(len(given.decode))
        return original(self, given)

    monkeypatch.setattr(NullExecutable, "step", counted)
    monkeypatch.setattr(kernel_profile, "record_launches", record)
    return counts


def test_decode_steps_are_recorded_and_their_state_given_back(recorded: list[int]) -> None:
    executable = compiled(tiny_model(), "null")
    jobs = [Job((1, 2, 3), SamplingParams(max_tokens=30))] * 2
    found = profile_decode(executable, jobs, ["wqkv", "wo"], num_steps=8)
    assert recorded == [9] and found is not None and found.num_steps == 8
    short = [Job((1, 2, 3), SamplingParams(max_tokens=10))] * 2
    found = profile_decode(executable, short, ["wqkv", "wo"], num_steps=8)
    assert recorded == [9, 5] and found is not None and found.num_steps == 4


def test_a_prompt_is_recorded_up_to_the_next_step(recorded: list[int]) -> None:
    executable = compiled(tiny_model(), "null")
    found = profile_prompt(executable, Job((1, 2, 3), SamplingParams(max_tokens=9)), ["wqkv", "wo"])
    assert recorded == [2] and found is not None and found.num_steps == 1
