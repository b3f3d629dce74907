"""Token selection, async scheduling, and random engine calls on the cuda executable."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.grids import only
from tests.masks import allowed_of
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, BFP8_CACHE_NOISE, SMALL
from tests.tiny import (
    compiled,
    joined,
    leave_slot,
    precision_of,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    END_TOKEN,
    GOES_ON,
    PrefillChunk,
    SampledTokens,
    Slot,
    Step,
)
from tilewright.runtime.engine import Engine

BF16 = precision_of("bf16", kv_cache="bfp8")


@pytest.fixture(scope="module")
def executable() -> Executable:
    return compiled(tiny_model(std=0.2, **SMALL), "cuda", precision=BF16, compute="fast")


GREEDY = SamplingParams()
ROWS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=5),
    SamplingParams(temperature=1.5, top_k=7, seed=2**62 + 3),
    SamplingParams(temperature=2.0, top_p=0.6, seed=-(2**60)),
]


def started(executable: Executable, rows: Sequence[SamplingParams]) -> tuple[Slot, ...]:
    """Open a slot per row, with prompts of two tokens, three tokens, and more."""
    slots = tuple(take_slot(executable, 40 + len(rows), row) for row in rows)
    for length, slot in enumerate(slots, 2):
        chunk = PrefillChunk(slot, 0, tuple(random_tokens(length, seed=length)))
        assert not executable.step(Step(prompts=(chunk,))).parts
    return slots


def first_step(slots: Sequence[Slot], *, want_logits: bool = False) -> Step:
    """Run a step with given tokens."""
    forced = dict(zip(slots, random_tokens(len(slots), seed=77), strict=True))
    return Step(decode=tuple(slots), forced=forced, want_logits=want_logits)


def release(executable: Executable, slots: Sequence[Slot]) -> None:
    for slot in slots:
        leave_slot(executable, slot)


def expected_choice(logits: Tensor, rows: Sequence[SamplingParams]) -> list[int]:
    """Return the expected tokens after the first step."""
    given = [SamplingRow(row, length + 1) for length, row in enumerate(rows, 2)]
    tokens, is_number = choose_tokens(logits, given)
    assert all(is_number)
    return tokens


@pytest.mark.parametrize("rows", only([ROWS], [ROWS, ROWS[:1] * 3, ROWS[2:]]))
def test_tokens_are_chosen_as_the_op_does(
    executable: Executable, rows: list[SamplingParams]
) -> None:
    chosen, is_greedy = set(), all(row.is_greedy for row in rows)
    for shift in range(1 if is_greedy else 2):  # equal logits, other random numbers
        moved = [replace(row, seed=row.seed + shift) for row in rows]
        slots = started(executable, moved)
        output = executable.step(first_step(slots, want_logits=True))
        tokens = list(output.parts[0].read().tokens)
        assert tokens == expected_choice(joined(output), moved)
        chosen.add(tuple(tokens))
        release(executable, slots)
    assert is_greedy or len(chosen) > 1


def test_end_tokens_finish_their_own_row_alone(executable: Executable) -> None:
    def read(rows: list[SamplingParams]) -> SampledTokens:
        slots = started(executable, rows)
        found = executable.step(first_step(slots)).parts[0].read()
        release(executable, slots)
        return found

    endless = read([GREEDY] * 3)
    tokens = endless.tokens
    assert endless.why == [GOES_ON] * 3
    others = [next(t for t in range(61) if t not in tokens) for _ in tokens]
    ends = [(others[0],), (others[1], tokens[1]), (tokens[2], tokens[2], others[2])]
    expected = SampledTokens(tokens, [GOES_ON, END_TOKEN, END_TOKEN])
    assert read([SamplingParams(stop_token_ids=each) for each in ends]) == expected
    one = SamplingParams(temperature=1.0, top_k=1, seed=9)  # a single candidate
    assert read([replace(one, stop_token_ids=each) for each in ends]) == expected


def test_more_end_tokens_than_the_device_looks_for_end_a_sequence(executable: Executable) -> None:
    """No new capture is needed. A later slot has its own end tokens."""
    slots = started(executable, [GREEDY, GREEDY])
    tokens = executable.step(first_step(slots)).parts[0].read().tokens
    release(executable, slots)
    many = SamplingParams(stop_token_ids=(*range(100, 140), tokens[1]))
    for rows, why in (([many, many], [GOES_ON, END_TOKEN]), ([GREEDY] * 2, [GOES_ON] * 2)):
        slots = started(executable, rows)
        assert executable.step(first_step(slots)).parts[0].read() == SampledTokens(tokens, why)
        release(executable, slots)
    slots = started(executable, [many, many])
    output = executable.step(replace(first_step(slots), masked=True))
    executable.choose(output, allowed_of({slot: np.arange(61) == tokens[1] for slot in slots}))
    assert output.parts[0].read() == SampledTokens([tokens[1]] * 2, [END_TOKEN] * 2)
    release(executable, slots)


@pytest.mark.parametrize("num_tokens", [2, 9])
@pytest.mark.parametrize("row", ROWS[:2], ids=["greedy", "sampled"])
def test_a_prompt_chooses_its_first_token(
    executable: Executable, num_tokens: int, row: SamplingParams
) -> None:
    slot = take_slot(executable, 20, row)
    chunk = PrefillChunk(slot, 0, tuple(random_tokens(num_tokens)), chooses=True)
    output = executable.step(Step(prompts=(chunk,), want_logits=True))
    expected, _ = choose_tokens(joined(output), [SamplingRow(row, num_tokens)])
    assert output.parts[0].read() == SampledTokens(expected, [GOES_ON])
    leave_slot(executable, slot)


def step_by_step(executable: Executable, rows: list[SamplingParams], count: int) -> list[list[int]]:
    """Run steps with tokens from the host."""
    slots = started(executable, rows)
    given, found = first_step(slots), []
    for _ in range(count):
        found.append(list(executable.step(given).parts[0].read().tokens))
        given = Step(decode=slots, forced=dict(zip(slots, found[-1], strict=True)))
    release(executable, slots)
    return found


@pytest.mark.parametrize("rows", only([ROWS[:1] * 2], [ROWS[:1] * 2, ROWS[1:3]]))
def test_running_ahead_is_the_same_step_by_step(
    executable: Executable, rows: list[SamplingParams]
) -> None:
    """Also after a different step, with rows gathered again."""
    expected = step_by_step(executable, rows, 3)
    for interrupted in (-1, 1):
        slots = started(executable, rows)
        parts = [executable.step(first_step(slots)).parts[0]]
        for at in range(1, 3):
            if at == interrupted:
                other = take_slot(executable, 8)
                step(executable, [(other, [1, 2, 3], 0)])
                step(executable, [(other, [4], 3)])
                leave_slot(executable, other)
            parts += executable.step(Step(decode=slots)).parts
        assert [part.read().tokens for part in parts] == expected, interrupted
        release(executable, slots)
    assert len({tuple(tokens) for tokens in expected}) > 1


def test_a_sequence_takes_the_pages_it_needs(executable: Executable) -> None:
    """Memory use equals the pages of 64 positions."""
    assert executable.memory().state == 0
    handle = take_slot(executable, 3)
    a_page = executable.memory().state
    # keys and values, 64 positions, 16 mantissas and an exponent per head block
    assert a_page == 2 * 64 * (16 + 1) == executable.state_bytes(1) == executable.state_bytes(64)
    assert executable.state_bytes(65) == 2 * a_page
    leave_slot(executable, handle)
    assert executable.memory().state == 0


def test_a_closed_executable_lets_its_memory_go() -> None:
    found = compiled(tiny_model(**SMALL), "cuda", precision=BF16, compute="fast")
    weight = next(iter(found._weights._placed.values()))  # type: ignore[attr-defined]
    assert weight is not None
    found.close()
    assert not hasattr(found, "_weights") and not hasattr(found, "_state")


class Twins:
    """Makes equal calls on two engines. ``worst`` is the largest relative error."""

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
    """Make ``count`` random calls: prompts, restarts, decode and removals."""
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
            if ids[0] not in live and len(live) == capabilities.max_num_seqs:
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
    assert twins.engines[1].executable.memory().state == 0
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
    """Prompts span several pages and exceed the buckets, with up to twelve sequences."""
    changes = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "vocab_size": 1003}
    model = tiny_model(std=0.08, max_positions=2048, **changes)
    twins = Twins(model, kind, max_batch=12, max_context=1024)
    done = random_operations(twins, 1000, longest=700, seed=4)
    assert min(done.values()) > 50
    assert twins.worst < max(BOUNDS[kind], 1e-4)


def test_what_is_closed_may_be_closed_again() -> None:
    made = compiled(tiny_model(num_layers=1), "cuda", precision=BF16, compute="fast")
    made.close()
    made.close()
