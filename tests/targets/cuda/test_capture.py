"""Buckets: their inputs, and on the device their captured graphs, which equal eager steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, noise
from tests.tiny import (
    compiled,
    copy_slot,
    precision_of,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.graphs import capture
from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.attention.split import Spread, share_of_step
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import ADA
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import MAX_SMALL_M
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.attention import AttentionRunner
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
    SwapHandle,
    SwapIn,
    SwapOut,
)

CPU = torch.device("cpu")
VOCABULARY = 1003


def test_without_a_gpu_a_capture_is_the_function_itself() -> None:
    seen: list[int] = []
    run = CapturedGraph(lambda: seen.append(len(seen)), CPU, None)
    assert seen == []
    run()
    run()
    assert seen == [0, 1]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_decode_step_is_padded_to_its_bucket(rows: int) -> None:
    """Padding rows have no position and change no logits."""
    model = tiny_model(std=0.2, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    found = compiled(model, "cuda", precision=precision_of("bf16"), compute="fast", max_batch=3)
    handles = [take_slot(found, 8) for _ in range(rows)]
    for handle in handles:
        step(found, [(handle, [2], 0)])
    step(found, [(handle, [3 + handle], 1) for handle in handles])
    inner: Any = found
    (bucket,) = inner._buckets.decodes.values()
    assert bucket.num_rows == (1, 2, 4)[rows - 1]
    assert bucket.rows.positions.tolist() == [2] * rows + [-1] * (bucket.num_rows - rows)


@pytest.mark.parametrize("first", [0, 3])
def test_a_long_bucket_tells_a_prompt_s_start_from_its_rest(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a prompt has its own graph, because its attention differs."""
    monkeypatch.setattr(
        AttentionRunner, "begins_otherwise", lambda self, num_tokens: num_tokens > 8
    )
    model = tiny_model(std=0.2, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    found = compiled(model, "cuda", precision=precision_of("bf16"), compute="fast", max_batch=1)
    inner: Any = found
    handle = take_slot(found, 20)
    if first:
        step(found, [(handle, random_tokens(first), 0)])
    step(found, [(handle, random_tokens(9), first)])
    kept = list(inner._buckets.prompts[16]._passes)
    assert kept == ([True, False] if first else [True])


CHANGES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_heads": 8},
    **{"num_kv_heads": 2, "vocab_size": VOCABULARY, "max_positions": 2048},
}
BATCH = 40


_MADE: list[Executable] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close a test's objects immediately, without the garbage collector."""
    yield
    while _MADE:
        _MADE.pop().close()


def on_device(
    name: str, *, max_batch: int = BATCH, max_context: int = 512, **changes: Any
) -> Executable:
    """Two layers with real sizes, for 40 sequences with 512 positions."""
    model = tiny_model(std=0.05, **{**CHANGES, **changes})
    precision = precision_of(name, kv_cache="bf16")
    options = {"compute": "fast", "max_batch": max_batch, "max_context": max_context}
    _MADE.append(compiled(model, "cuda", precision=precision, **options))
    return _MADE[-1]


def prompts_in(executable: Executable, count: int) -> list[tuple[Slot, list[int], int]]:
    """Prefill ``count`` sequences with different lengths. Return the next token for each."""
    work = []
    for index in range(count):
        length = 2 + (index * 37) % 200
        handle = take_slot(executable, 300)
        tokens = random_tokens(length + 1, vocab_size=VOCABULARY, seed=index)
        step(executable, [(handle, tokens[:-1], 0)])
        work.append((handle, tokens[-1:], length))
    return work


def copies(
    executable: Executable, work: list[tuple[Slot, list[int], int]]
) -> list[tuple[Slot, list[int], int]]:
    """Copy slots, because a decode step cannot be undone."""
    return [
        (copy_slot(executable, handle, position), tokens, position)
        for handle, tokens, position in work
    ]


def eager(executable: Executable, work: list[tuple[Slot, list[int], int]]) -> Tensor:
    """Run a bucket's step without its graph, padding included."""
    inner: Any = executable
    size = next(size for size in inner._buckets.rows if size >= len(work))
    rows = torch.zeros(3, size, dtype=torch.int64)
    rows[1] = -1
    for at, (handle, (token,), position) in enumerate(work):
        rows[:, at] = torch.tensor([token, position, handle])
    with torch.no_grad():
        logits = inner._steps.decode(TokenBatch(*rows.to(inner.device)))
    return logits[: len(work)].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_a_graph_is_the_step_bit_for_bit(name: str) -> None:
    executable = on_device(name)
    work = prompts_in(executable, 5)
    again = copies(executable, work)
    captured = step(executable, work)
    assert torch.equal(eager(executable, work), captured)
    assert torch.equal(step(executable, again), captured)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "count"),
    [
        (name, count) for name in ("bf16", "bfp8", "bfp4") for count in (1, 2, MAX_SMALL_M)
    ],  # more rows are not batch-invariant
)
def test_rows_of_a_batch_are_those_of_each_alone(name: str, count: int) -> None:
    executable = on_device(name, max_batch=3 * count)
    work = prompts_in(executable, count)
    singles, reverse = copies(executable, work), copies(executable, work)[::-1]
    together = step(executable, work)
    alone = torch.cat([step(executable, [each]) for each in singles])
    assert torch.equal(together, alone)
    assert torch.equal(step(executable, reverse), together.flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "bfp8"])
@pytest.mark.parametrize(("num_rows", "head_dim"), [(1, 64), (1, 128), (MAX_SMALL_M, 64), (9, 64)])
def test_rows_go_on_in_other_graphs_where_they_have_more_pages(
    num_rows: int, head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal logits across graph sizes where steps are batch-invariant."""
    assert isinstance(share_of_step(1, 2, 32, 128, strict=False), Spread)
    found = []
    for is_split in (True, False):
        if not is_split:
            monkeypatch.setattr(attention_shares, "reaches_of", lambda num_pages: (num_pages,))
        sizes = {"max_context": 2560, "max_positions": 4096, "head_dim": head_dim}
        executable = on_device(name, max_batch=num_rows, **sizes)
        inner: Any = executable
        assert len(inner._steps.attention.reaches) == (3 if is_split else 1)
        slots = [take_slot(executable, 2100) for _ in range(num_rows)]
        logits = []
        for start, count in ((0, 510), (514, 1532), (2050, 0)):
            for slot in slots if count else ():
                tokens = random_tokens(count, vocab_size=VOCABULARY, seed=slot + count)
                step(executable, [(slot, tokens, start)])
            for at in range(start + count, start + count + 4):
                logits.append(step(executable, [(slot, [at % 60], at) for slot in slots]))
        (bucket,) = inner._buckets.decodes.values()
        assert [*bucket._passes] == list(inner._steps.attention.reaches)
        found.append(torch.cat(logits))
    assert noise(*found) < BF16_NOISE
    if num_rows <= MAX_SMALL_M:
        assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3}])
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_native_kernels_are_as_triton_s(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for columns with partial tiles, whose padding must not be read."""
    found = []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(nvrtc, "gpu_of", lambda device: ADA)
        executable = on_device(name, **changes)
        inner: Any = executable
        if is_native and not inner._steps.is_native:
            pytest.skip("this device has no native kernels")
        assert inner._steps.is_native is is_native
        torch.full((1 << 28,), float("nan"), device="cuda")  # content of new memory
        rows = [step(executable, prompts_in(executable, count)) for count in (1, 5, 20)]
        executable.close()
        found.append(torch.cat(rows))
    assert found[0].isfinite().all()
    assert noise(*found) < BF16_NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, 70])
@pytest.mark.parametrize("length", [600, 1000, 2000])
@pytest.mark.parametrize("name", ["bf16", "bfp8"])
def test_a_long_prompt_s_last_row_is_near_that_of_its_bucket(
    name: str, length: int, start: int
) -> None:
    """Compare a padded graph, all logits without a graph, and a continued prompt."""
    executable = on_device(name, max_batch=3, max_context=2560, max_positions=4096)
    tokens = random_tokens(start + length, vocab_size=VOCABULARY)
    slots = [take_slot(executable, start + length) for _ in range(3)]
    torch.full((1 << 28,), float("nan"), device="cuda")
    for slot in slots if start else ():
        step(executable, [(slot, tokens[:start], 0)])
    last = step(executable, [(slots[0], tokens[start:], start)])
    rows = step(executable, [(slots[1], tokens[start:], start)], rows=range(length))
    inner: Any = executable
    assert next(size for size in inner._buckets.tokens if size >= length) in inner._buckets.prompts
    assert rows.isfinite().all() and noise(last, rows[-1:]) < BF16_NOISE
    step(executable, [(slots[2], tokens[start : start + 64], start)])
    behind = step(executable, [(slots[2], tokens[start + 64 :], start + 64)])
    assert noise(last, behind) < BF16_NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 9, 16, 17, 33, 64, 65, 130, 300])
def test_a_prompt_s_rows_are_near_those_of_its_bucket(length: int) -> None:
    """Compare all logits, without a graph, with the last logits from a padded graph."""
    executable = on_device("bfp8")
    tokens = random_tokens(length, vocab_size=VOCABULARY)
    handles = [take_slot(executable, length) for _ in range(2)]
    torch.full((1 << 28,), float("nan"), device="cuda")
    last = step(executable, [(handles[0], tokens, 0)])
    rows = step(executable, [(handles[1], tokens, 0)], rows=range(length))
    assert rows.isfinite().all()
    assert noise(last, rows[-1:]) < BF16_NOISE


@pytest.mark.gpu
def test_a_chain_of_graphs_is_a_chain_of_steps() -> None:
    """Tokens, positions and random numbers stay on the device."""
    from tests.targets.cuda.test_executable import ROWS, first_step, release, started, step_by_step

    executable = on_device("bfp8")
    expected = step_by_step(executable, ROWS, 20)
    slots = started(executable, ROWS)
    earlier, found = executable.step(first_step(slots)).parts[0], []
    for _ in range(19):
        later = executable.step(Step(decode=slots)).parts[0]
        found.append(earlier.read().tokens)
        earlier = later
    assert [*found, earlier.read().tokens] == expected
    release(executable, slots)


@pytest.mark.gpu
def test_parts_may_be_read_in_any_order_and_much_later() -> None:
    """Also after their pinned buffers were reused."""
    from tests.targets.cuda.test_executable import ROWS, first_step, started, step_by_step

    executable = on_device("bfp8")
    expected = step_by_step(executable, ROWS, 40)
    slots = started(executable, ROWS)
    parts = [*executable.step(first_step(slots)).parts]
    parts += [executable.step(Step(decode=slots)).parts[0] for _ in range(39)]
    found = [part.read().tokens for part in reversed(parts)]
    assert found[::-1] == expected
    assert [part.read().tokens for part in parts] == expected


@pytest.mark.gpu
def test_more_rows_than_the_largest_bucket_choose_as_each_does_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.targets.cuda.test_executable import ROWS, first_step, release, started

    monkeypatch.setattr(capture, "MAX_DECODE_ROWS", 64)
    executable = on_device("bfp8", max_batch=70)
    rows = [ROWS[index % len(ROWS)] for index in range(70)]
    slots = started(executable, rows)
    steps = [executable.step(first_step(slots)), executable.step(Step(decode=slots))]
    whole = [[token for part in each.parts for token in part.read().tokens] for each in steps]
    assert [part.slots for part in steps[0].parts] == [slots[:64], slots[64:]]
    release(executable, slots)
    slots = started(executable, rows)
    forced = first_step(slots).forced
    for index in (0, 33, 63, 64, 69):
        alone = (slots[index],)
        first = executable.step(Step(decode=alone, forced={slots[index]: forced[slots[index]]}))
        second = executable.step(Step(decode=alone))
        found = [each.parts[0].read().tokens for each in (first, second)]
        assert found == [[tokens[index]] for tokens in whole], index


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_a_hundred_rows_are_near_each_alone(name: str) -> None:
    """They run in a single step. Its graph equals a step without a graph."""
    executable = on_device(name, max_batch=204)
    work = prompts_in(executable, 100)
    again, singles = copies(executable, work), copies(executable, work[::25])
    together = step(executable, work)
    inner: Any = executable
    assert list(inner._buckets.decodes) == [128]
    assert torch.equal(eager(executable, again), together)
    alone = torch.cat([step(executable, [each]) for each in singles])
    assert noise(together[::25], alone) < BF16_NOISE


@pytest.mark.gpu
def test_state_goes_to_pinned_memory_and_back_while_steps_run() -> None:
    """Other sequences overwrite the pages without synchronization."""
    executable = on_device("bfp8")
    tokens, place = tuple(random_tokens(200, vocab_size=VOCABULARY)), SwapHandle(0)
    a, b, c = Slot(0), Slot(1), Slot(2)
    begins = (OpenSlot(a, SamplingParams()), AssignPages(a, 0, (3, 2, 1, 0)))
    executable.step(Step(edits=begins, prompts=(PrefillChunk(a, 0, tokens, chooses=True),)))
    expected = [executable.step(Step(decode=(a,))).parts[0] for _ in range(3)][1:]
    executable.reset()
    executable.step(Step(edits=begins, prompts=(PrefillChunk(a, 0, tokens, chooses=True),)))
    executable.step(Step(decode=(a,)))
    taken = (
        SwapOut(a, place),
        CloseSlot(a),
        OpenSlot(b, SamplingParams()),
        AssignPages(b, 0, (0, 1, 2, 3)),
    )
    executable.step(Step(edits=taken, prompts=(PrefillChunk(b, 0, tokens[::-1], chooses=True),)))
    again = (OpenSlot(c, SamplingParams()), AssignPages(c, 0, (9, 8, 7, 6)), SwapIn(c, place))
    found = [executable.step(Step(edits=again, decode=(c,))).parts[0]]
    found.append(executable.step(Step(decode=(c,))).parts[0])
    assert [part.read() for part in found] == [part.read() for part in expected]
