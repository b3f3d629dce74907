"""Buckets: what is put into them, and on the device their captured graphs, which are the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_qwen3_5 import ON_CUDA
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, noise
from tests.tiny import compiled, lowered, precision_of, random_tokens, step, take_seat, tiny_model
from tilewright.compiler.ops import SamplingBatch
from tilewright.compiler.targets.base import Executable, StateHandle
from tilewright.compiler.targets.cuda import capture
from tilewright.compiler.targets.cuda import steps as steps_module
from tilewright.compiler.targets.cuda.capture import Captured, make_choice, prompt_buckets
from tilewright.compiler.targets.cuda.plan import make_plan
from tilewright.compiler.targets.cuda.steps import Rows

CPU = torch.device("cpu")
VOCABULARY = 1003


def test_parameters_of_fewer_rows_leave_no_ends_of_the_rows_before() -> None:
    choice = make_choice(4, VOCABULARY, 3, torch.zeros(4, dtype=torch.int64), CPU)

    def batch(rows: int, ends: list[int]) -> SamplingBatch:
        return SamplingBatch(
            temperature=torch.full((rows,), 0.5),
            top_k=torch.full((rows,), 7),
            top_p=torch.full((rows,), 0.25),
            seeds=torch.arange(rows) + 2**40,
            positions=torch.arange(rows) + 5,
            end_tokens=torch.tensor([ends] * rows),
        )

    choice.upload(batch(4, [1, 2, 3]))
    choice.upload(batch(2, [9]))
    assert choice.end_tokens.tolist() == [[9, -1, -1]] * 2 + [[-1] * 3] * 2
    assert choice.seeds[:2].tolist() == [2**40, 2**40 + 1]
    assert choice.positions[:2].tolist() == [5, 6]
    assert choice.top_p[:2].tolist() == [0.25] * 2 and choice.top_k[:2].tolist() == [7, 7]


def test_without_a_gpu_a_capture_is_the_function_itself() -> None:
    seen: list[int] = []
    run = Captured(lambda: seen.append(len(seen)), CPU, None)
    assert seen == []
    run()
    run()
    assert seen == [0, 1]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_decode_step_is_padded_to_its_bucket(rows: int) -> None:
    """Rows of padding have no position, move nowhere, and change no logits."""
    model = tiny_model(std=0.2, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    found = compiled(model, "cuda", precision=precision_of("bf16"), compute="fast", max_batch=3)
    handles = [take_seat(found, 8) for _ in range(rows)]
    step(found, [(handle, [3 + handle], 0) for handle in handles])
    inner: Any = found
    assert found.capabilities.buckets == (1, 2, 4)
    (bucket,) = inner._decodes.values()
    assert bucket.num_rows == (1, 2, 4)[rows - 1]
    assert bucket.rows.positions.tolist() == [1] * rows + [-1] * (bucket.num_rows - rows)


def test_longer_prompts_are_captured_where_they_are_many_launches() -> None:
    plans = [
        make_plan(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
        for model in (tiny_model(num_layers=1), tiny_model(model_type="qwen3_5", **ON_CUDA))
    ]
    assert [prompt_buckets(plan)[-1] for plan in plans] == [512, 2048]
    assert prompt_buckets(plans[1])[:6] == prompt_buckets(plans[0])


@pytest.mark.parametrize("first", [0, 3])
def test_a_long_bucket_tells_a_prompt_s_start_from_its_rest(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They attend in different ways, so each has a capture."""
    monkeypatch.setattr(capture, "LIBRARY_ATTENTION", 8)
    model = tiny_model(std=0.2, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    found = compiled(model, "cuda", precision=precision_of("bf16"), compute="fast", max_batch=1)
    inner: Any = found
    handle = take_seat(found, 20)
    if first:
        step(found, [(handle, random_tokens(first), 0)])
    step(found, [(handle, random_tokens(9), first)])
    kept = list(inner._prompts[16]._captured)
    assert kept == ([(True, True), (True, False)] if first else [(True, True)])


CHANGES: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_heads": 8},
    **{"num_kv_heads": 2, "vocab_size": VOCABULARY, "max_positions": 2048},
}
BATCH = 40


_MADE: list[Executable] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """What a test made goes with it: not whenever Python next looks for circles."""
    yield
    while _MADE:
        _MADE.pop().close()


def on_device(name: str, **changes: Any) -> Executable:
    """Two layers of a small model with real sizes, for 40 sequences of 512 positions."""
    model = tiny_model(std=0.05, **{**CHANGES, **changes})
    precision = precision_of(name, kv_cache="bf16")
    options = {"compute": "fast", "max_batch": BATCH, "max_context": 512}
    _MADE.append(compiled(model, "cuda", precision=precision, **options))
    return _MADE[-1]


def prompts_in(executable: Executable, count: int) -> list[tuple[StateHandle, list[int], int]]:
    """``count`` sequences of different lengths, and the token each is fed next."""
    work = []
    for index in range(count):
        length = 2 + (index * 37) % 200
        handle = take_seat(executable, 300)
        tokens = random_tokens(length + 1, vocab_size=VOCABULARY, seed=index)
        step(executable, [(handle, tokens[:-1], 0)])
        work.append((handle, tokens[-1:], length))
    return work


def eager(executable: Executable, work: list[tuple[StateHandle, list[int], int]]) -> Tensor:
    """The step of a bucket without its graph: the same rows, padding and all."""
    inner: Any = executable
    size = next(size for size in executable.capabilities.buckets if size >= len(work))
    rows = torch.zeros(3, size, dtype=torch.int64)
    rows[1] = -1
    for at, (handle, (token,), position) in enumerate(work):
        rows[:, at] = torch.tensor([token, position, handle])
    with torch.no_grad():
        logits = inner._steps.decode(Rows(*rows.to(inner._device)))
    return logits[: len(work)].cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_a_graph_is_the_step_bit_for_bit(name: str) -> None:
    executable = on_device(name)
    work = prompts_in(executable, 5)
    captured = step(executable, work)
    assert torch.equal(eager(executable, work), captured)
    assert torch.equal(step(executable, work), captured)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(("bf16", count) for count in (1, 2, 8, 16)),  # more go through the library
        *((name, count) for name in ("bfp8", "bfp4") for count in (1, 2, 8, 16, 33)),
    ],
)
def test_rows_of_a_batch_are_those_of_each_alone(name: str, count: int) -> None:
    executable = on_device(name)
    work = prompts_in(executable, count)
    together = step(executable, work)
    alone = torch.cat([step(executable, [each]) for each in work])
    assert torch.equal(together, alone)
    assert torch.equal(step(executable, work[::-1]), together.flip(0))


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{}, {"hidden_size": 576, "num_heads": 9, "num_kv_heads": 3}])
@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_native_kernels_are_as_triton_s(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the columns are no whole tiles: what pads them must not be read as numbers."""
    found = []
    for is_native in (True, False):
        if not is_native:
            monkeypatch.setattr(steps_module.native, "why_not", lambda device: "switched off")
        executable = on_device(name, **changes)
        inner: Any = executable
        if is_native and not inner._steps.is_native:
            pytest.skip("this device has no native kernels")
        assert inner._steps.is_native is is_native
        torch.full((1 << 28,), float("nan"), device="cuda")  # what fresh memory then holds
        rows = [step(executable, prompts_in(executable, count)) for count in (1, 5, 20)]
        executable.close()
        found.append(torch.cat(rows))
    assert found[0].isfinite().all()
    assert noise(*found) < BF16_NOISE


@pytest.mark.gpu
@pytest.mark.parametrize("length", [2, 9, 16, 17, 33, 64, 65, 130, 300])
def test_a_prompt_s_rows_are_near_those_of_its_bucket(length: int) -> None:
    """All its logits, which no graph gives, and the last, from a graph with padding."""
    executable = on_device("bfp8")
    tokens = random_tokens(length, vocab_size=VOCABULARY)
    handles = [take_seat(executable, length) for _ in range(2)]
    torch.full((1 << 28,), float("nan"), device="cuda")
    last = step(executable, [(handles[0], tokens, 0)])
    rows = step(executable, [(handles[1], tokens, 0)], rows=range(length))
    assert rows.isfinite().all()
    assert noise(last, rows[-1:]) < BF16_NOISE


@pytest.mark.gpu
def test_a_chain_of_graphs_is_a_chain_of_steps() -> None:
    """Tokens, positions and random numbers go from step to step on the device."""
    from tests.targets.cuda.test_executable import ROWS, decode_input, sampling

    executable = on_device("bfp8")
    inputs = decode_input(executable, sampling(ROWS, [[-1]] * 4), want_logits=False)
    settled, expected = inputs, []
    for _ in range(20):
        expected.append(executable.step(settled).read())
        settled = settled.following(torch.tensor(expected[-1][0]))
    found, ahead = [], inputs
    output = executable.step(ahead)
    for _ in range(19):
        ahead = ahead.ahead(output)
        following = executable.step(ahead)
        found.append(output.read())
        output = following
    found.append(output.read())
    assert found == expected
    assert dataclasses.replace(inputs).advanced == 0
