"""The cuda executable equals the reference in any order, batch and chunks."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.grids import only
from tests.targets.test_conformance import (  # noqa: F401 (tests that any executable must pass)
    EXACT,
    SHAPES,
    assert_near,
    test_a_copy_shares_its_past_and_goes_its_own_way,
    test_a_slot_can_be_used_again,
    test_mixed_lengths_are_one_at_a_time,
    test_no_rows_are_asked_for,
    test_some_rows_only_are_asked_for,
    tokens_of,
)
from tests.tiny import (
    compiled,
    copy_slot,
    leave_slot,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    PrefillChunk,
    SamplerOutput,
    Slot,
    Step,
    StepOutput,
)

SMALL: dict[str, Any] = {
    **{"num_layers": 1, "hidden_size": 16, "intermediate_size": 32},
    **{"num_heads": 2, "num_kv_heads": 1},
}
"""Few programs for Triton's interpreter to run."""

BF16_NOISE = 10 * 2.0**-9
"""Root mean square of an error, relative to the logits' spread.

Rounding to bfloat16 is wrong by 2^-9 at most, by 2^-9 / sqrt(3) in the mean. Eight operands a layer
are rounded, and the head's: 17 independent errors, of 2.4 x 2^-9 together where nothing makes them
larger; softmax and sums that cancel may, four times.
"""
BFP8_CACHE_NOISE = 3 * BF16_NOISE
"""A block's mantissas have 7 bits, of its largest element."""


class Kept:
    """An executable with copied logits, for tests that compare several steps."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)

    def step(self, step: Step) -> StepOutput:
        return StepOutput(tuple(map(kept, self._executable.step(step).parts)))


def kept(part: SamplerOutput) -> SamplerOutput:
    if part.logits is None:
        return part
    logits = part.logits().clone()
    return dataclasses.replace(part, logits=lambda: logits)


def on_cuda(
    model: SimpleNamespace, precision: PrecisionConfig, compute: str, **options: Any
) -> Executable:
    found = compiled(model, "cuda", precision=precision, compute=compute, **options)
    return cast(Executable, Kept(found))


def noise(got: Tensor, expected: Tensor) -> float:
    """Return the error's root mean square, relative to the expected spread."""
    assert got.shape == expected.shape and 0.1 < expected.std() < 30
    return float((got - expected).square().mean().sqrt() / expected.std())


def in_pieces(executable: Executable, tokens: list[int], length: int) -> Tensor:
    """Return the logits at a prompt's last position and after each later token."""
    handle = take_slot(executable, len(tokens))
    logits = [step(executable, [(handle, tokens[:length], 0)])]
    for at in range(length, len(tokens)):
        logits.append(step(executable, [(handle, tokens[at : at + 1], at)]))
    leave_slot(executable, handle)
    return torch.cat(logits)


FORMATS = [("bf16", "in"), ("bfp8", "in"), ("bfp4", "in"), ("bfp8", "out"), ("bfp4", "out")]
CASES = [("grouped", *each) for each in FORMATS] + [
    (shape, *FORMATS[1 + index % 4])
    for index, shape in enumerate(sorted(SHAPES.keys() - {"grouped"}))
]
BY_DEFAULT = [
    *(("grouped", "bf16", "in"), ("grouped", "bfp4", "out")),
    *(each for each in CASES if each[0] in ("biases", "ragged")),
]
"""Aligned and odd sizes, with biases."""


@pytest.mark.parametrize(("shape", "name", "axis"), only(BY_DEFAULT, CASES))
def test_both_computes_are_the_reference(shape: str, name: str, axis: str) -> None:
    """Two layers in a case and one in the rest, for speed."""
    num_layers = 2 if (shape, name, axis) == ("grouped", "bfp4", "out") else 1
    model = tiny_model(std=0.2, **{**SHAPES[shape], "num_layers": num_layers})
    precision = precision_of(name, block_axis=axis, kv_cache="bf16")
    tokens = tokens_of(model, 6)
    expected = prefill(compiled(model, precision=precision), tokens)[4:]
    assert_near(in_pieces(on_cuda(model, precision, "exact"), tokens, 5), expected, EXACT)
    got = in_pieces(on_cuda(model, precision, "fast"), tokens, 5)
    assert 0 < noise(got, expected) < BF16_NOISE


def test_the_bounds_notice_what_is_wrong() -> None:
    """A changed token, format, bias or rotation exceeds the bounds."""
    model = tiny_model(std=0.2, attention_bias=True, **SMALL)
    tokens = random_tokens(12)
    assert tokens[5] != 60 - tokens[5]
    bfp8 = compiled(model, precision=precision_of("bfp8"))
    expected = prefill(bfp8, tokens)[-1:]
    wrong = {
        "past": prefill(bfp8, [*tokens[:5], 60 - tokens[5], *tokens[6:]])[-1:],
        "format": prefill(compiled(model, precision=precision_of("bfp4")), tokens)[-1:],
    }
    weights = model.checkpoint.tensors
    names = {"bias": "model.layers.0.self_attn.v_proj.bias", "norm": "model.norm.weight"}
    for what, name in names.items():
        kept = weights[name]
        weights[name] = kept.roll(1)
        wrong[what] = prefill(compiled(model, precision=precision_of("bfp8")), tokens)[-1:]
        weights[name] = kept
    for what, logits in wrong.items():
        assert noise(logits, expected) > 1.5 * BFP8_CACHE_NOISE, what


def test_a_prompt_over_a_page_in_chunks_of_odd_sizes() -> None:
    model = tiny_model(std=0.2, **{**SMALL, "num_heads": 1})
    precision = precision_of("bf16", kv_cache="bfp8")
    tokens = random_tokens(67)
    expected = prefill(compiled(model, precision=precision, max_context=80), tokens)[-3:]
    fast = on_cuda(model, precision, "fast", max_context=80)
    handle = take_slot(fast, 67)
    done, rows = 0, []
    for size in (3, 1, 48, 13, 1, 1):
        rows.append(step(fast, [(handle, tokens[done : done + size], done)]))
        done += size
    assert done == 67
    assert 0 < noise(torch.cat(rows)[-3:], expected) < BFP8_CACHE_NOISE


@pytest.fixture(scope="module")
def executable() -> Executable:
    """The executable for imported tests."""
    return on_cuda(tiny_model(std=0.2, **SMALL), precision_of("bf16"), "exact")


@pytest.fixture(scope="module")
def within() -> float:
    return EXACT


def test_a_prompt_is_its_tokens_one_by_one(executable: Executable) -> None:
    tokens = random_tokens(7)
    assert_near(prefill(executable, tokens, [1] * 6), prefill(executable, tokens))
    assert_near(prefill(executable, tokens, [3, 1, 2]), prefill(executable, tokens))


def fast_one(cache: str) -> Executable:
    precision = precision_of("bf16", kv_cache=cache)
    return on_cuda(tiny_model(std=0.2, **SMALL), precision, "fast")


@pytest.fixture(scope="module")
def fast() -> Executable:
    """With block formats for keys and values."""
    return fast_one("bfp8")


def started(executable: Executable, lengths: tuple[int, ...]) -> list[Slot]:
    """Open sequences with prompts of these lengths."""
    handles = [take_slot(executable, 40) for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        step(executable, [(handle, random_tokens(length, seed=length), 0)])
    return handles


def test_a_row_s_bits_do_not_depend_on_its_batch(fast: Executable) -> None:
    """For any row count and any row index."""
    lengths = (5, 1, 9, 3)
    tokens = random_tokens(4, seed=99)

    def rows(orders: list[tuple[int, ...]]) -> list[Tensor]:
        handles = started(fast, lengths)
        entries = [(handle, [tokens[i]], lengths[i]) for i, handle in enumerate(handles)]
        found = [step(fast, [entries[i] for i in order]) for order in orders]
        for handle in handles:
            leave_slot(fast, handle)
        return found

    alone = rows([(0,), (1,), (2,), (3,)])
    for order in ((0, 1, 2, 3), (2, 0, 3)):
        (together,) = rows([order])
        for row, i in enumerate(order):
            assert torch.equal(together[row], alone[i][0]), (order, i)


def poison(executable: Executable) -> None:
    """Fill all pages and all intermediate values with NaN. Operands keep their zero padding."""
    inner: Any = executable
    for pages in inner._state.pages.values():
        is_int = pages.values.dtype == torch.int8
        pages.values.fill_(127 if is_int else float("nan"))
        if pages.exponents is not None:
            pages.exponents.fill_(255)
    for buffer, values in zip(inner._steps._plan.buffers, inner._steps._flat, strict=True):
        if buffer.role != "operand":
            values.fill_(float("nan"))


@pytest.mark.parametrize("cache", ["bf16", "bfp8"])
def test_nothing_is_read_that_was_not_written(cache: str) -> None:
    """Other sequences' pages, old pages, and buffers from the previous step are not read."""
    fast = fast_one(cache)
    tokens = random_tokens(5, seed=4)
    expected = in_pieces(fast, tokens, 4)
    assert expected.isfinite().all()
    poison(fast)
    assert torch.equal(in_pieces(fast, tokens, 4), expected)


def test_pages_of_freed_sequences_leave_no_trace(fast: Executable) -> None:
    """A sequence in used pages, in another order, equals a sequence in new pages."""
    tokens = random_tokens(5, seed=4)
    expected = in_pieces(fast, tokens, 4)
    handles = started(fast, (5, 3, 4, 2))
    for handle in (handles[2], handles[0], handles[3]):
        leave_slot(fast, handle)
    assert torch.equal(in_pieces(fast, tokens, 4), expected)
    leave_slot(fast, handles[1])
    assert fast.memory().state == 0


def test_a_copy_has_the_bits_and_not_the_pages(fast: Executable) -> None:
    """Writes after position nine do not reach the copies, in both directions."""
    (handle,) = started(fast, (9,))
    copies = [copy_slot(fast, handle, 9) for _ in range(2)]
    first = step(fast, [(handle, [3], 9)])
    other = step(fast, [(copies[0], [50], 9)])
    assert not torch.equal(first, other)
    again = copy_slot(fast, handle, 9)  # shorter than the original
    assert torch.equal(step(fast, [(copies[1], [3], 9)]), first)
    assert torch.equal(step(fast, [(again, [50], 9)]), other)
    longer = step(fast, [(handle, [4], 10)])
    assert torch.equal(step(fast, [(copies[1], [4], 10)]), longer)
    for each in (handle, *copies, again):
        leave_slot(fast, each)


def test_a_copy_past_a_page_shares_it() -> None:
    """Only the two positions after the full page are copied."""
    executable = on_cuda(
        tiny_model(std=0.2, **SMALL), precision_of("bf16", kv_cache="bfp8"), "fast", max_context=80
    )
    handle = take_slot(executable)
    chunk = PrefillChunk(handle, 0, tuple(random_tokens(66)))
    executable.step(Step(prompts=(chunk,)))
    held = executable.memory().state
    copied = copy_slot(executable, handle, 66)
    assert executable.memory().state == held * 3 // 2
    rows = [step(executable, [(each, [3], 66)]) for each in (handle, copied)]
    assert torch.equal(*rows)


def test_an_empty_copy_is_a_fresh_sequence(fast: Executable) -> None:
    (handle,) = started(fast, (6,))
    fresh = copy_slot(fast, handle, 0)
    tokens = random_tokens(6, seed=6)
    assert torch.equal(step(fast, [(fresh, tokens, 0)]), step(fast, [(handle, tokens, 0)]))
    leave_slot(fast, handle)
    leave_slot(fast, fresh)
