"""Rows with masks on a device that runs ahead: it never waits for them, and their answers obey."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.runtime.queued import VOCAB, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.token_masks import put_bits
from tilewright.runtime.grammar.masks import Masks
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import CANCELLED, STOPPED
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

GRAMMARS: Any = SimpleNamespace(vocab_size=VOCAB)
END = 5


class Rule:
    """A matcher that allows what depends on every token before; and after six, the end too."""

    is_free, error, opener = False, "", None
    model_ends: tuple[int, ...] = ()
    end_tokens = (END,)

    def __init__(self) -> None:
        self.heard: list[int] = []

    def follow(self, output: Sequence[int]) -> None:
        assert list(output[: len(self.heard)]) == self.heard, "another answer's matcher"
        self.heard[:] = output

    @property
    def is_met(self) -> bool:
        return len(self.heard) >= 6

    @property
    def is_finished(self) -> bool:
        return False

    def write_bits(self, words: np.ndarray) -> None:
        words.fill(0)
        tokens = tuple(t for t in range(VOCAB) if obeys(self.heard, t) and t != END)
        put_bits(words, tokens, are_set=True)


def obeys(heard: Sequence[int], token: int) -> bool:
    return (token + sum(heard)) % 3 != 0 or (token == END and len(heard) >= 6)


def request(number: int, *, wanted: int = 12, prompt: int = 3) -> RequestState:
    """Every second one is bound by the rule."""
    matcher: Any = Rule() if number % 2 else None
    sampling = SamplingParams(
        seed=number, max_tokens=wanted, stop_token_ids=(END,) if matcher is not None else ()
    )
    tokens = tuple((5 * number + at) % VOCAB for at in range(prompt))
    return RequestState(number, tokens, sampling, matcher=matcher)


def alone(number: int, **shape: int) -> list[int]:
    made = request(number, **shape)
    EngineLoop(QueuedExecutable(runs_ahead=False), grammars=GRAMMARS).generate([made])
    if made.matcher is not None:
        assert all(obeys(made.output[:at], token) for at, token in enumerate(made.output))
    return made.output


def test_the_device_does_not_wait_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the host most of a step, and so long the device has the next one's forward part."""
    executable = QueuedExecutable()
    executable.step_seconds, executable.host_seconds = 0.006, 0.0005
    take = Masks.take

    def slow(self: Masks) -> Any:
        executable.clock.now += 0.005
        return take(self)

    monkeypatch.setattr(Masks, "take", slow)
    made = [request(number, wanted=40) for number in range(4)]
    EngineLoop(executable, grammars=GRAMMARS).generate(made)
    # before the first choice nothing else can be queued
    assert executable.idle_seconds == pytest.approx(0.0005)
    assert [each.output for each in made] == [alone(n, wanted=40) for n in range(4)]
    assert any(each.finish_reason == STOPPED for each in made)


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_and_goes_each_answer_is_its_own(seed: int) -> None:
    """Arrivals, cancellations and preemption, while a choice is waited for or not."""
    rng = random.Random(seed)
    limits: dict[str, Any] = {"max_num_seqs": rng.randint(1, 4), "runs_ahead": rng.random() < 0.8}
    if rng.random() < 0.7:
        limits |= {"page_size": 4, "num_pages": rng.randint(8, 14)}
    if rng.random() < 0.5:
        limits["passes"] = ((9, (4, 8)),)
    executable = QueuedExecutable(**limits)
    policy = SchedulerConfig(host_bytes=rng.choice((0, 40)))
    loop = EngineLoop(executable, policy=policy, grammars=GRAMMARS)
    shapes = [{"wanted": rng.randint(1, 20), "prompt": rng.randint(1, 9)} for _ in range(9)]
    made = [request(number, **shape) for number, shape in enumerate(shapes)]
    for number, each in enumerate(made, 1):
        loop.scheduler.add(each)  # its matcher is there already
        for _ in range(rng.randint(0, 4)):
            loop.step()
        if rng.random() < 0.2:
            loop.cancel(rng.choice(made[:number]))
    for _ in range(2000):
        loop.step()
    assert not loop.has_work()
    for number, (each, shape) in enumerate(zip(made, shapes, strict=True)):
        expected = alone(number, **shape)
        if each.finish_reason == CANCELLED:
            assert each.output == expected[: len(each.output)]
        else:
            assert each.output == expected
    assert not executable.num_places
