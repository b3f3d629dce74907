"""How the cuda executable chooses tokens, runs ahead, and answers random calls of the engine."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.grids import only
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, BFP8_CACHE_NOISE, SMALL
from tests.tiny import (
    compiled,
    copy_seat,
    leave_seat,
    precision_of,
    random_tokens,
    step,
    take_seat,
    tiny_model,
)
from tilewright.compiler import ops
from tilewright.compiler.errors import RequestError
from tilewright.compiler.ops import SamplingBatch
from tilewright.compiler.runtime.engine import Engine
from tilewright.compiler.targets.base import Executable, StepInput, StepOutput

BF16 = precision_of("bf16", kv_cache="bfp8")


@pytest.fixture(scope="module")
def executable() -> Executable:
    return compiled(tiny_model(std=0.2, **SMALL), "cuda", precision=BF16, compute="fast")


def sampling(rows: list[tuple[float, int, float, int]], ends: list[list[int]]) -> SamplingBatch:
    """(temperature, top k, top p, seed) a row; tokens will stand at position 30 and after."""
    heat, top_k, top_p, seeds = zip(*rows, strict=True)
    return SamplingBatch(
        temperature=torch.tensor(heat),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        seeds=torch.tensor(seeds),
        positions=torch.arange(30, 30 + len(rows)),
        end_tokens=torch.tensor(ends),
        is_greedy=all(each <= 0 for each in heat),
    )


ROWS = [(0.0, 0, 1.0, 0), (1.0, 0, 1.0, 5), (1.5, 7, 1.0, 2**62 + 3), (2.0, 0, 0.6, -(2**60))]
NO_ENDS = [[-1]] * 4


def decode_input(
    executable: Executable, batch: SamplingBatch, *, want_logits: bool = True
) -> StepInput:
    """A decode step of as many sequences as ``batch`` has rows, with prompts of their own."""
    lengths = [2 + row for row in range(len(batch.seeds))]
    handles = [take_seat(executable, 40) for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        step(executable, [(handle, random_tokens(length, seed=length), 0)])
    count = len(lengths)
    return StepInput(
        torch.tensor(random_tokens(count, seed=77)),
        torch.tensor(lengths),
        torch.arange(count + 1),
        torch.arange(count),
        tuple(handles),
        batch,
        want_logits=want_logits,
    )


def release(executable: Executable, inputs: StepInput) -> None:
    for handle in inputs.states:
        leave_seat(executable, handle)


def expected_choice(output: StepOutput, batch: SamplingBatch) -> tuple[list[int], list[bool]]:
    assert output.logits is not None
    parameters = batch.temperature, batch.top_k, batch.top_p, batch.seeds, batch.positions
    tokens = ops.sample.reference(output.logits, *parameters)
    return tokens.tolist(), (tokens.unsqueeze(-1) == batch.end_tokens).any(-1).tolist()


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 3, ROWS[2:]], ids=["mixed", "greedy", "two"])
def test_tokens_are_chosen_as_the_op_does(
    executable: Executable, rows: list[tuple[float, int, float, int]]
) -> None:
    batch = sampling(rows, NO_ENDS[: len(rows)])
    inputs = decode_input(executable, batch)
    chosen = set()
    for shift in range(1 if batch.is_greedy else 3):  # the same logits, other random numbers
        moved = dataclasses.replace(batch, positions=batch.positions + shift)
        output = executable.step(dataclasses.replace(inputs, sampling=moved))
        assert output.read() == expected_choice(output, moved)
        chosen.add(tuple(output.read()[0]))
    assert batch.is_greedy or len(chosen) > 1
    release(executable, inputs)


def test_end_tokens_finish_their_own_row_alone(executable: Executable) -> None:
    inputs = decode_input(executable, sampling(ROWS[:1] * 3, NO_ENDS[:3]))
    tokens, finished = executable.step(inputs).read()
    assert finished == [False] * 3
    others = [next(t for t in range(61) if t not in tokens) for _ in tokens]
    ends = [[others[0], -1, -1], [others[1], tokens[1], -1], [tokens[2], tokens[2], others[2]]]
    batch = sampling(ROWS[:1] * 3, ends)
    assert executable.step(dataclasses.replace(inputs, sampling=batch)).read() == (
        tokens,
        [False, True, True],
    )
    heated = sampling([(1.0, 1, 1.0, 9)] * 3, ends)  # of one candidate each
    assert executable.step(dataclasses.replace(inputs, sampling=heated)).read() == (
        tokens,
        [False, True, True],
    )
    release(executable, inputs)


@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.parametrize("row", ROWS[:2], ids=["greedy", "sampled"])
def test_a_prompt_chooses_its_first_token(
    executable: Executable, num_tokens: int, row: tuple[float, int, float, int]
) -> None:
    handle = take_seat(executable, 20)
    batch = sampling([row], [[-1]])
    inputs = StepInput(
        torch.tensor(random_tokens(num_tokens)),
        torch.arange(num_tokens),
        torch.tensor([0, num_tokens]),
        torch.tensor([num_tokens - 1]),
        (handle,),
        batch,
        want_logits=True,
    )
    output = executable.step(inputs)
    assert output.read() == expected_choice(output, batch)
    leave_seat(executable, handle)


@pytest.mark.parametrize("rows", [ROWS[:1] * 2, ROWS[1:3]], ids=["greedy", "sampled"])
def test_running_ahead_is_the_same_step_by_step(
    executable: Executable, rows: list[tuple[float, int, float, int]]
) -> None:
    """Also where something else runs in between, and the device has to be told all again."""
    num_steps, batch = 3, sampling(rows, NO_ENDS[: len(rows)])
    settled = inputs = decode_input(executable, batch, want_logits=False)
    expected = []
    for _ in range(num_steps):
        output = executable.step(settled)
        expected.append(output.read())
        settled = settled.following(torch.tensor(expected[-1][0]))
    other = take_seat(executable, 8)
    for interrupted in (-1, 1):
        ahead, found = inputs, []
        for at in range(num_steps):
            output = executable.step(ahead)
            if at == interrupted:
                kept = output.read()
                output = StepOutput(torch.tensor(kept[0]), torch.tensor(kept[1]))
                step(executable, [(other, [1, 2, 3], 0)])
                step(executable, [(other, [4], 3)])
            found.append(output.read())
            ahead = ahead.ahead(output)
        assert found == expected, interrupted
    assert len({tuple(tokens) for tokens, _ in expected}) > 1
    leave_seat(executable, other)
    release(executable, inputs)


def test_some_rows_of_a_decode_step_choose() -> None:
    """Two sequences are fed, and only the second's token is asked for."""
    executable = compiled(tiny_model(std=0.2, **SMALL), "cuda", precision=BF16, compute="fast")
    batch = sampling(ROWS[:2], NO_ENDS[:2])
    inputs = decode_input(executable, batch)
    whole = executable.step(inputs)
    assert whole.logits is not None
    logits, expected = whole.logits.clone(), whole.read()
    one = SamplingBatch(
        **{
            each.name: getattr(batch, each.name)[1:]
            for each in dataclasses.fields(batch)
            if each.name != "is_greedy"
        }
    )
    part = dataclasses.replace(inputs, logit_rows=torch.tensor([1]), sampling=one)
    output = executable.step(part)
    assert output.logits is not None and torch.equal(output.logits, logits[1:])
    assert output.read() == ([expected[0][1]], [expected[1][1]])


def test_a_sequence_takes_the_pages_it_needs(executable: Executable) -> None:
    """Nothing is held before, and what is held is the pages' bytes: 64 positions each."""
    assert executable.memory().state == 0
    handle = take_seat(executable, 3)
    a_page = executable.memory().state
    # keys and values, 64 positions, 16 mantissas and an exponent of each head's block
    assert a_page == 2 * 64 * (16 + 1) == executable.state_bytes(1) == executable.state_bytes(64)
    assert executable.state_bytes(65) == 2 * a_page
    leave_seat(executable, handle)
    assert executable.memory().state == 0


def test_too_many_and_too_long_sequences_are_refused(executable: Executable) -> None:
    with pytest.raises(RequestError, match="a sequence of 65 positions; allowed: 1 to 64"):
        take_seat(executable, 65)
    handles = [take_seat(executable, 64) for _ in range(4)]
    with pytest.raises(RequestError, match="all 4 sequences are in use"):
        take_seat(executable, 1)
    with pytest.raises(RequestError, match="all 4 sequences are in use"):
        copy_seat(executable, handles[0], 1)
    for handle in handles:
        leave_seat(executable, handle)
    assert executable.num_free() == 4 and executable.memory().state == 0


def test_a_closed_executable_lets_its_memory_go() -> None:
    found = compiled(tiny_model(**SMALL), "cuda", precision=BF16, compute="fast")
    weight = next(iter(found._weights._placed.values()))  # type: ignore[attr-defined]
    assert weight is not None
    found.close()
    assert not hasattr(found, "_weights") and not hasattr(found, "_state")


class Twins:
    """The same calls of two engines; ``worst`` is the largest error relative to the spread."""

    def __init__(self, model: SimpleNamespace, kind: str, **options: Any) -> None:
        cache, compute = ("bf16", "exact") if kind == "exact" else (kind, "fast")
        precision = precision_of("bf16", kv_cache=cache)
        self.engines = [
            Engine(compiled(model, "reference", precision=precision, **options)),
            Engine(compiled(model, "cuda", precision=precision, compute=compute, **options)),
        ]
        self.vocab_size = model.config.vocab_size
        self.worst = 0.0

    def call(self, method: str, ids: list[int], *arguments: Any) -> None:
        expected, got = (getattr(each, method)(ids, *arguments) for each in self.engines)
        if isinstance(expected, Tensor):
            error = (got - expected).square().mean().sqrt() / expected.std()
            self.worst = max(self.worst, float(error))
            assert got.isfinite().all()


def random_operations(twins: Twins, count: int, *, longest: int, seed: int) -> dict[str, int]:
    """``count`` calls with ids in any order: prompts, restarts, decoding of any, removals."""
    chance = random.Random(seed)
    capabilities = twins.engines[1].executable.capabilities
    lengths: dict[int, int] = {}
    done = dict.fromkeys(("prefill", "decode", "remove"), 0)
    for number in range(count):
        live = list(lengths)
        method = chance.choice(["prefill", "decode", "decode", "decode", "remove"])
        if method == "decode":
            ids = chance.sample(live, chance.randint(1, len(live))) if live else []
            ids = [each for each in ids if lengths[each] < capabilities.max_context]
            method = method if ids else "prefill"
        if method == "prefill":
            ids = [chance.choice(live) if live and chance.random() < 0.3 else number]
            if ids[0] not in live and len(live) == capabilities.max_batch:
                method, ids = "remove", [chance.choice(live)]
        elif method == "remove":
            ids = chance.sample([*live, -1], 1)
        done[method] += 1
        tokens = random_tokens(max(longest, 8), vocab_size=twins.vocab_size, seed=number)
        if method == "prefill":
            lengths[ids[0]] = chance.randint(1, longest)
            twins.call(method, ids, [torch.tensor(tokens[: lengths[ids[0]]])])
        elif method == "decode":
            twins.call(method, ids, torch.tensor(tokens[: len(ids)]))
            lengths |= {each: lengths[each] + 1 for each in ids}
        else:
            twins.call(method, ids)
            lengths.pop(ids[0], None)
    for engine in twins.engines:
        assert set(engine.request_ids) == set(lengths)
        engine.remove(list(lengths))
        assert engine.executable.num_free() == capabilities.max_batch
    return done


BOUNDS = {"exact": 1e-5, "bf16": 1.5 * BF16_NOISE, "bfp8": 1.5 * BFP8_CACHE_NOISE}
"""The worst of many steps of few rows, each."""


@pytest.mark.parametrize(
    ("kind", "count"),
    only([("exact", 40)], [("exact", 40), ("exact", 100), ("bf16", 12), ("bfp8", 16)]),
)
def test_random_operations_are_the_reference_s(kind: str, count: int) -> None:
    twins = Twins(tiny_model(std=0.2, **SMALL), kind)
    done = random_operations(twins, count, longest=5, seed=3)
    assert min(done.values()) >= count // 20
    assert twins.worst < BOUNDS[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", BOUNDS)
def test_a_thousand_random_operations_on_the_device(kind: str) -> None:
    """Prompts over several pages and past the captured buckets, up to twelve sequences."""
    changes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 1003}
    model = tiny_model(std=0.08, max_positions=2048, **changes)
    twins = Twins(model, kind, max_batch=12, max_context=1024)
    done = random_operations(twins, 1000, longest=700, seed=4)
    assert min(done.values()) > 50
    assert twins.worst < max(BOUNDS[kind], 1e-4)
