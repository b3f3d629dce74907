"""Ranks of a group against one device over many positions, among many rows, and in any order of
operations: with whole experts on each rank as with a part of every expert.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.dealt_models import assert_equal, make
from tests.tiny import leave_slot, precision_of, prefill, random_tokens, step, take_slot
from tilewright.compiler.driver import compile_virtual
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

NUM_SEQUENCES, LENGTH = 16, 256
"""4,096 positions with tokens given."""

MOST_ROWS = 64
GROUPS = [
    ("qwen3_moe", ParallelConfig(2, expert=2)),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (
            ("llama", ParallelConfig(2)),
            ("qwen3_moe", ParallelConfig(2, expert=1)),
            ("qwen3_5_moe", ParallelConfig(4, expert=2)),
        )
    ),
]


def made(
    model: SimpleNamespace, parallel: ParallelConfig, *, context: int, slots: int = MOST_ROWS
) -> Executable:
    options = CompileOptions(max_batch=slots, max_context=context, parallel=parallel)
    return compile_virtual(model, precision_of(), options=options).executable


def forced(executable: Executable) -> Tensor:
    """Log probabilities at every position of sequences that do not depend on the logits."""
    prompts = [random_tokens(LENGTH, vocab_size=131, seed=each) for each in range(NUM_SEQUENCES)]
    logits = [prefill(executable, each, (1 + at, 1, 99)) for at, each in enumerate(prompts)]
    return torch.log_softmax(torch.cat(logits).double(), -1)


@pytest.mark.parametrize(("model_type", "parallel"), GROUPS)
def test_four_thousand_positions_are_those_of_one_device(
    model_type: str, parallel: ParallelConfig
) -> None:
    model = make(model_type, **({} if "3_5" in model_type else {"num_layers": 1}))
    expected = forced(made(model, SINGLE_RANK, context=LENGTH, slots=1))
    for wire, most, share in (("fp32", 1e-6, 0.999), ("bf16", 1e-4, 0.97)):
        group = ParallelConfig(parallel.tensor, expert=parallel.expert, wire=wire)
        found = forced(made(model, group, context=LENGTH, slots=1))
        divergence = (expected.exp() * (expected - found)).sum(-1)
        same = (expected.argmax(-1) == found.argmax(-1)).double().mean()
        print(f"{wire}: KL {divergence.mean():.2e}, most {divergence.max():.2e}; {same:.4f}")
        assert len(found) == NUM_SEQUENCES * LENGTH
        assert divergence.mean() <= most and same >= share


@pytest.mark.parametrize(("model_type", "parallel"), GROUPS)
def test_company_moves_no_row(model_type: str, parallel: ParallelConfig) -> None:
    """Alone and among 2 to 64 rows of a step, which choose other experts."""
    model = make(model_type, **({} if "3_5" in model_type else {"num_layers": 1}))
    executable = made(model, parallel, context=32)
    prompts = [random_tokens(3 + at % 5, vocab_size=131, seed=at) for at in range(MOST_ROWS)]
    expected = torch.empty(0)
    for count in (1, 2, 3, 16, MOST_ROWS):
        slots = []
        for prompt in prompts[:count]:
            slots.append(take_slot(executable))
            step(executable, [(slots[-1], prompt, 0)])
        work = [(s, [at], len(prompts[at])) for at, s in enumerate(slots)]
        found = step(executable, work)[:1]
        expected = found if count == 1 else expected
        assert_equal(found, expected)
        for slot in slots:
            leave_slot(executable, slot)


def answers(executable: Executable, count: int) -> dict[int, list[int]]:
    """What requests that come, are cancelled and go on at random were answered."""
    rng, loop, found = random.Random(7), EngineLoop(executable), dict[int, list[int]]()
    requests: list[RequestState] = []

    def turn() -> None:
        for done in loop.step():
            found[int(done.request_id)] = list(done.output)
            if done in requests:
                requests.remove(done)

    for number in range(count):
        kind = rng.random()
        if kind < 0.1:
            prompt = tuple(rng.choices(range(131), k=rng.randint(1, 24)))
            sampling = SamplingParams(max_tokens=rng.randint(1, 30), temperature=0.0)
            requests.append(RequestState(number, prompt, sampling))
            loop.add(requests[-1])
        elif kind < 0.13 and requests:
            loop.cancel(requests.pop(rng.randrange(len(requests))))
        elif loop.has_work():
            turn()
    while loop.has_work():
        turn()
    return found


@pytest.mark.parametrize(
    "count", [pytest.param(200, id="few"), pytest.param(100_000, marks=pytest.mark.slow, id="many")]
)
def test_random_operations_are_answered_as_by_one_device(count: int) -> None:
    """Whole experts on each of two ranks; operations depend on no answer."""
    model = make("qwen3_moe", num_layers=1)
    expected, found = (
        answers(made(model, parallel, context=64, slots=6), count)
        for parallel in (SINGLE_RANK, ParallelConfig(2, expert=2))
    )
    assert len(found) > count // 20 and found == expected
