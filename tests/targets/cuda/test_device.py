"""GPU memory budgets, their error messages, and machines without a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import lowered, precision_of, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cuda import batch_size
from tilewright.compiler.targets.cuda import memory_budget as device_module
from tilewright.compiler.targets.cuda.batch_size import with_batch_that_fits
from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import scratch_bytes
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import (
    check_fits,
    check_room,
    copies_in,
    free_bytes,
    num_snapshots,
    open_device,
    page_notes,
    shared_pages,
    state_bytes,
    weight_bytes,
    work_bytes,
)
from tilewright.compiler.targets.cuda.numerics import cache_kind
from tilewright.compiler.targets.cuda.state.pages import allocate_pages, page_bytes, pages_of
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds, copy_bytes, kinds_for
from tilewright.compiler.targets.cuda.weights.e4m3 import LEAST_LOFI
from tilewright.compiler.targets.cuda.weights.stream import load_weights
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram
from tilewright.errors import CompileError
from tilewright.models import load_model

MODEL = tiny_model(max_positions=4096)
OPTIONS = CompileOptions(max_batch=3, max_context=130)


def plan_of(cache: str = "bf16") -> KernelProgram:
    precision = precision_of("bfp8", kv_cache=cache)
    return lower_to_program(lowered(MODEL, target="cuda", precision=precision)[0])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_without_a_gpu_there_is_an_error_of_one_line(no_gpu: None) -> None:
    with pytest.raises(CompileError) as caught:
        open_device()
    message = str(caught.value)
    assert message.startswith("target cuda: this machine has no GPU that torch can use; allowed: ")
    assert "--target cpu" in message and "\n" not in message


def test_the_interpreter_stands_for_a_gpu_where_it_is_asked_for(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in ("0", ""):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(CompileError, match="no GPU"):
            open_device()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert open_device() == torch.device("cpu")


@pytest.mark.parametrize("compute", ["fast", "exact"])
@pytest.mark.parametrize("cache", ["bf16", "bfp8", "fp32"])
def test_the_bytes_are_those_that_are_allocated(cache: str, compute: str) -> None:
    plan, options = plan_of(cache), CompileOptions(3, 130, compute)
    allocated = 0
    for state in plan.states:
        kind = cache_kind(state.format, exact=compute == "exact")
        pages = allocate_pages(
            3 * pages_of(130), *state.shape[1:], kind=kind, device=torch.device("cpu")
        )
        allocated += pages.num_bytes
    assert state_bytes(plan, options) == allocated
    weights = load_weights(
        plan, weight_source(MODEL), torch.device("cpu"), lambda what, done, total: None
    )
    assert weight_bytes(plan) == weights.num_bytes


@pytest.fixture
def no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fixed workspace, which is much larger than a tiny model."""
    monkeypatch.setattr(device_module, "_WORKSPACE", 0)


def needed(plan: KernelProgram, options: CompileOptions) -> int:
    return weight_bytes(plan) + state_bytes(plan, options) + work_bytes(plan, options)


def test_what_fits_is_not_refused_and_one_byte_less_is(no_workspace: None) -> None:
    plan = plan_of()
    check_fits(plan, OPTIONS, needed(plan, OPTIONS))
    with pytest.raises(CompileError):
        check_fits(plan, OPTIONS, needed(plan, OPTIONS) - 1)


PAGE_BYTES = 2 * 2 * 2 * 64 * 16 * 2
"""Two layers; keys and values of two heads, 64 positions, 16 elements of bfloat16."""


@pytest.mark.parametrize(
    ("num_pages", "allowed"),
    [
        (
            8,
            "a context of up to 128 positions at this batch, or a batch of up to 2 at this context",
        ),
        (3, "a context of up to 64 positions at this batch, or a batch of up to 1 at this context"),
        (2, "a batch of 1 with up to 128 positions"),
        (0, "a smaller model, or formats of fewer bits"),
        (-1, "a smaller model, or formats of fewer bits"),
    ],
)
def test_the_message_says_what_would_fit(no_workspace: None, num_pages: int, allowed: str) -> None:
    """Three sequences with 130 positions need nine pages."""
    plan = plan_of()
    assert state_bytes(plan, OPTIONS) == 9 * PAGE_BYTES
    free = needed(plan, OPTIONS) + (num_pages - 9) * PAGE_BYTES
    with pytest.raises(CompileError) as caught:
        check_fits(plan, OPTIONS, free)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(f"allowed: {allowed}")
    assert re.match(
        r"target cuda: \d+\.\d GB are needed \(\d+\.\d of weights, \d+\.\d of cache, "
        r"\d+\.\d to work\) for a batch of 3 with 130 positions each, and -?\d+\.\d GB of the ",
        message,
    )


@pytest.mark.parametrize(("free", "asked"), [(8, (3, 130)), (5, (2, 200)), (2, (3, 130))])
def test_what_the_message_allows_does_fit(
    no_workspace: None, free: int, asked: tuple[int, int]
) -> None:
    plan, options = plan_of(), CompileOptions(*asked)
    room = weight_bytes(plan) + work_bytes(plan, options) + free * PAGE_BYTES
    with pytest.raises(CompileError) as caught:
        check_fits(plan, options, room)
    found = str(caught.value).partition("allowed: ")[2]
    tried = 0
    for pattern, change in (
        (r"context of up to (\d+)", lambda most: {"max_context": most}),
        (r"batch of up to (\d+)", lambda most: {"max_batch": most}),
        (r"batch of 1 with up to (\d+)", lambda most: {"max_batch": 1, "max_context": most}),
    ):
        for most in re.findall(pattern, found):
            changes: dict[str, Any] = {"max_batch": asked[0], "max_context": asked[1]}
            changes |= change(int(most))
            assert state_bytes(plan, CompileOptions(**changes)) <= free * PAGE_BYTES
            tried += 1
    assert tried >= 1


def test_the_message_of_gigabytes() -> None:
    """Bytes are shown in gigabytes: cache, workspace and values."""
    with pytest.raises(CompileError) as caught:
        check_fits(plan_of(), CompileOptions(max_batch=4096, max_context=4096), 4 * 10**9)
    assert str(caught.value) == (
        "target cuda: 6.5 GB are needed (0.0 of weights, 4.3 of cache, 2.2 to work) for a batch of "
        "4096 with 4096 positions each, and 4.0 GB of the GPU's memory are free; allowed: a "
        "context of up to 1728 positions at this batch, or a batch of up to 1758 at this context"
    )


@pytest.mark.parametrize("num_pages", [3, 4, 50])
def test_a_pool_is_what_the_memory_holds(no_workspace: None, num_pages: int) -> None:
    """A pool has at least the pages for a single sequence."""
    plan = plan_of()
    free = weight_bytes(plan) + work_bytes(plan, OPTIONS) + num_pages * PAGE_BYTES
    assert shared_pages(plan, OPTIONS, free) == num_pages
    with pytest.raises(CompileError, match=r"GB are needed .* for a batch of 1 with 130"):
        shared_pages(plan, OPTIONS, free - (num_pages - 2) * PAGE_BYTES)


def test_the_splits_of_cross_attention_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("shape:tiny-vision")
    assert model.vision is not None
    text: Any = replace(model, module=model.vision.text_module)
    plan = lower_to_program(lowered(text, target="cuda", precision=precision_of("bf16"))[0])
    options = replace(OPTIONS, max_batch=256)
    before = work_bytes(plan, options)
    monkeypatch.setattr(device_module, "scratch_bytes", lambda *_: 0)
    assert before - work_bytes(plan, options) == scratch_bytes(256, 4, 16)


def test_copies_are_held_where_every_context_fits_beside_them(no_workspace: None) -> None:
    plan = plan_of()
    size = copy_bytes(plan, kinds_for(OPTIONS))
    least = needed(plan, OPTIONS) + size
    assert size > 0 and copies_in(plan, OPTIONS, least) == kinds_for(OPTIONS)
    assert copies_in(plan, OPTIONS, least - 1) == NO_COPIES
    check_fits(plan, OPTIONS, least, size)
    asked = replace(OPTIONS, copies="all")
    with pytest.raises(CompileError, match=r"of dequantized weight copies, .*, or no copies$"):
        check_fits(plan, asked, least - 1, copy_bytes(plan, copies_in(plan, asked, least - 1)))


def test_copies_are_held_where_pages_keep_three_quarters(no_workspace: None) -> None:
    plan, options = plan_of(), replace(OPTIONS, max_batch=10**6, memory_fraction=0.9)
    size, kept = copy_bytes(plan, kinds_for(options)), weight_bytes(plan)
    least = kept + work_bytes(plan, options) + 4 * size
    assert copies_in(plan, options, least) == kinds_for(options)
    assert copies_in(plan, options, least - 1) == NO_COPIES
    assert shared_pages(plan, options, least, size) == 3 * size // PAGE_BYTES
    assert copies_in(plan, replace(options, copies="none"), least) == NO_COPIES


def test_pages_that_copies_replace_are_noted_if_not_all_contexts_fit(no_workspace: None) -> None:
    plan, options = plan_of(), replace(OPTIONS, max_batch=100, memory_fraction=0.9)
    kept, size = weight_bytes(plan) + work_bytes(plan, options), 40 * PAGE_BYTES
    free = kept + 160 * PAGE_BYTES
    (note,) = page_notes(plan, options, free, size)
    assert "of the cache: 120 pages in place of 160; --weight-copies none" in note
    assert page_notes(plan, options, free, 0) == ()
    assert page_notes(plan, replace(options, max_batch=3), free, size) == ()


def test_copies_of_blocks_remain_where_those_of_codes_do_not_fit(no_workspace: None) -> None:
    precision = precision_of("bfp8", ff1_3="q40")
    plan = lower_to_program(lowered(tiny_model(), target="cuda", precision=precision)[0])
    kinds, least = kinds_for(OPTIONS), needed(plan, OPTIONS)
    blocks, size = replace(kinds, rounded=False), copy_bytes(plan, kinds)
    assert 0 < copy_bytes(plan, blocks) < size
    assert copies_in(plan, OPTIONS, least + size) == kinds
    assert copies_in(plan, OPTIONS, least + size - 1) == blocks


def test_codes_alone_are_held_where_not_all_copies_fit(no_workspace: None) -> None:
    model = tiny_model(hidden_size=64, intermediate_size=128, max_positions=4096)
    precision = precision_of("bfp8", ff1_3="bfp4", li_ff1_3="lofi")
    plan = lower_to_program(lowered(model, target="cuda", precision=precision)[0])
    codes = Kinds(codes=True)
    both, few = copy_bytes(plan, kinds_for(OPTIONS)), copy_bytes(plan, codes)
    least = needed(plan, OPTIONS)
    assert 0 < few < both
    assert copies_in(plan, OPTIONS, least + both) == kinds_for(OPTIONS)
    assert copies_in(plan, OPTIONS, least + both - 1) == codes
    assert copies_in(plan, OPTIONS, least + few) == codes
    assert copies_in(plan, OPTIONS, least + few - 1) == NO_COPIES
    asked = replace(OPTIONS, copies="codes")
    assert [copies_in(plan, asked, free) for free in (least, least + both)] == [codes, codes]
    assert copies_in(plan, replace(OPTIONS, is_strict=True), least + few) == NO_COPIES


@pytest.mark.parametrize("by_contexts", [False, True])
def test_codes_leave_pages_a_third_and_contexts_for_their_rows(
    by_contexts: bool, no_workspace: None
) -> None:
    """The pages keep a third of their memory, or 33 full contexts if these need more."""
    model = tiny_model(hidden_size=64, intermediate_size=16_384, max_positions=4096)
    precision = precision_of("bfp8", ff1_3="bfp4", li_ff1_3="lofi")
    plan = lower_to_program(lowered(model, target="cuda", precision=precision)[0])
    context = 1024 if by_contexts else 1
    options = replace(OPTIONS, max_batch=10**6, max_context=context, memory_fraction=0.9)
    codes = Kinds(codes=True)
    size, kept = copy_bytes(plan, codes), weight_bytes(plan) + work_bytes(plan, options)
    contexts = state_bytes(plan, replace(options, max_batch=LEAST_LOFI))
    left = contexts if by_contexts else -(-size // 2)
    assert by_contexts == (contexts > size // 2)
    assert copies_in(plan, options, kept + size + left) == codes
    assert copies_in(plan, options, kept + size + left - 1) == NO_COPIES


@pytest.mark.parametrize(("fraction", "expected"), [(None, 60), (0.5, 40), (0.9, 60)])
def test_a_fraction_is_of_what_this_process_may_take(
    fraction: float | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process's memory is excluded. The result is at most the free memory."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 10)
    options = replace(OPTIONS, memory_fraction=fraction)
    assert free_bytes(options, torch.device("cuda", 0)) == expected


def test_which_copies_options_gain_by() -> None:
    assert kinds_for(OPTIONS) == Kinds(values=True, codes=True, rounded=True)
    assert kinds_for(replace(OPTIONS, is_strict=True)) == Kinds(values=True)
    assert kinds_for(replace(OPTIONS, copies="codes")) == Kinds(codes=True)
    assert kinds_for(replace(OPTIONS, compute="exact")) == NO_COPIES


def test_on_the_cpu_there_is_always_room(tmp_path: Path) -> None:
    options = CompileOptions(max_batch=10**6, max_context=10**6)
    check_room(plan_of(), options, torch.device("cpu"))


@pytest.mark.gpu
def test_too_large_a_cache_is_refused_on_the_device() -> None:
    options = CompileOptions(max_batch=10**6, max_context=4096)
    with pytest.raises(CompileError, match="GB of the GPU's memory are free; allowed: a context"):
        check_room(plan_of(), options, open_device())


def test_snapshots_take_what_is_left_and_leave_room_to_work(no_workspace: None) -> None:
    model = tiny_model(model_type="qwen3_5", **ON_CUDA)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
    each, work = sequence_bytes(plan.sequence_states), work_bytes(plan, OPTIONS)
    found = [num_snapshots(plan, OPTIONS, work + room) for room in (-5, each - 1, 9 * each, 10**9)]
    assert found == [0, 0, 9, 512]
    assert num_snapshots(plan_of(), OPTIONS, 10**12) == 0
    kept = weight_bytes(plan) + work + OPTIONS.max_batch * each
    pool = shared_pages(plan, OPTIONS, kept + 10**8) * page_bytes(plan.states[0], "bf16")
    assert 10**8 - pool * len(plan.states) >= 512 * each


@pytest.mark.parametrize(("contexts", "share"), [(1.5, 1.5 / 8), (2.2, 2.2 / 8), (6.0, 4.0 / 2)])
def test_snapshots_take_half_of_what_whole_contexts_leave_and_an_eighth_at_least(
    contexts: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two contexts belong to the two slots."""
    monkeypatch.setattr(device_module, "_MAX_SNAPSHOTS", 10**6)
    model = tiny_model(model_type="qwen3_5", **ON_CUDA)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
    options = replace(OPTIONS, max_batch=2)
    a_page = len(plan.states) * page_bytes(plan.states[0], "bf16")
    a_context = pages_of(options.max_context) * a_page
    kept = weight_bytes(plan) + work_bytes(plan, options) + 2 * sequence_bytes(plan.sequence_states)
    pages = shared_pages(plan, options, kept + int(contexts * a_context))
    assert pages * a_page == pytest.approx((contexts - share) * a_context, abs=a_page)


@pytest.mark.parametrize(
    ("spare_pages", "expected"),
    [
        (32 * 3, 32),  # every context has its pages
        (31 * 3, 16),
        (10_000, 64),
        (2 * 3, 2),
    ],
)
def test_batch_auto_is_the_largest_that_keeps_the_pages(
    spare_pages: int, expected: int, no_workspace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of()
    auto = CompileOptions(64, 130, memory_fraction=0.9, copies="none", least_batch=2)
    fixed = weight_bytes(plan) + work_bytes(plan, replace(auto, max_batch=32))
    free = fixed + spare_pages * PAGE_BYTES
    monkeypatch.setattr(device_module, "free_bytes", lambda *_: free)
    monkeypatch.setattr(device_module, "_page_bytes", lambda *_: PAGE_BYTES)
    cuda: Any = torch.device("cuda")
    monkeypatch.setattr(batch_size, "_KEPT_PAGES", 1.0)
    found = with_batch_that_fits(plan, auto, cuda)
    assert found.max_batch == expected
    assert with_batch_that_fits(plan, replace(auto, least_batch=None), cuda).max_batch == 64
    small = with_batch_that_fits(plan, replace(auto, strict_rows=16), cuda)
    assert small.is_strict == (expected <= 16), "it never has more sequences"
