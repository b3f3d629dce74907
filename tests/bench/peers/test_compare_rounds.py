"""Rounds in turn: the order of work, the figures, and contestants that fail on the way."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import pytest

from bench.peers.rounds import (
    Contestant,
    Measure,
    Plan,
    measure_all,
    ratios,
)
from bench.peers.worker import Generated, Loaded, WorkerError

PLAN = Plan(prefill_lengths=(4, 8), context=4, num_decoded=5, num_rounds=3)
TEXT = list(range(1000))


class FakeWorker:
    """Prefills at ``prefill_tps`` and decodes at ``decode_tps``; the first step takes a second."""

    def __init__(self, name: str, log: list[tuple[str, int, int]], rates: tuple[float, float]):
        self.name, self.log = name, log
        self.prefill_tps, self.decode_tps = rates
        self.prompts: list[tuple[int, ...]] = []
        self.num_left = 10**6
        self.is_closed = False

    def loaded(self) -> Loaded:
        self.log.append((self.name, 0, 0))
        return Loaded(2000, 1000)

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        assert not self.is_closed
        self.num_left -= 1
        if self.num_left < 0:
            raise WorkerError("ended with SIGSEGV")
        self.log.append((self.name, len(tokens), num_tokens))
        self.prompts.append(tuple(tokens))
        first = len(tokens) / self.prefill_tps
        times = [first, *(first + 1 + i / self.decode_tps for i in range(num_tokens - 1))]
        return Generated(tuple(range(num_tokens)), tuple(times))

    def settle(self) -> None:
        self.log.append((self.name, -1, -1))

    def close(self) -> None:
        self.is_closed = True


def enter(worker: FakeWorker) -> Contestant:
    return Contestant("engine", worker.name, lambda: worker)  # type: ignore[arg-type, return-value]


def run(contestants: Sequence[Contestant]) -> list[float]:
    readings = iter(float(i) for i in range(1, 100))
    return measure_all(contestants, PLAN, tokens=TEXT, bandwidth=lambda: next(readings))


@pytest.fixture
def log() -> list[tuple[str, int, int]]:
    return []


def test_work_goes_in_turn(log: list[tuple[str, int, int]]) -> None:
    workers = [FakeWorker(name, log, (10.0, 20.0)) for name in "AB"]
    assert run([enter(worker) for worker in workers]) == [1.0, 2.0, 3.0, 4.0]
    idle = (-1, -1)
    loaded = ((0, 0), (4, 1), (8, 1), (4, 5), idle)
    warm_up = [(name, *work) for name in "AB" for work in loaded]
    turn = [
        (name, *step) for work in ((4, 1), (8, 1), (4, 5)) for name in "AB" for step in (work, idle)
    ]
    assert log == warm_up + 3 * turn
    assert all(worker.is_closed for worker in workers)


def test_both_get_the_same_prompts_and_none_twice(log: list[tuple[str, int, int]]) -> None:
    workers = [FakeWorker(name, log, (10.0, 20.0)) for name in "AB"]
    run([enter(worker) for worker in workers])
    assert workers[0].prompts == workers[1].prompts
    starts = [prompt[:4] for prompt in workers[0].prompts]
    assert len(set(starts)) == len(starts) == 3 * (1 + PLAN.num_rounds)


def test_rates_medians_and_ratios(log: list[tuple[str, int, int]]) -> None:
    ours, peer = (
        enter(FakeWorker("A", log, (30.0, 20.0))),
        enter(FakeWorker("B", log, (10.0, 40.0))),
    )
    run([ours, peer])
    assert ours.rates["prefill-8"] == pytest.approx([30.0] * 3)
    assert ours.rates["decode-4"] == pytest.approx([20.0] * 3), "the first step does not count"
    found = {measure: median(repeats) for measure, repeats in ratios(ours, peer).items()}
    assert found == pytest.approx({"prefill-4": 3.0, "prefill-8": 3.0, "decode-4": 0.5})
    assert ours.record(PLAN, 40_000.0)["bandwidth_share"] == pytest.approx(0.5)


def test_ratios_are_taken_round_by_round() -> None:
    ours = Contestant("ours", "a", _never, rates={"decode-4": [10.0, 20.0, 90.0]})
    peer = Contestant("peer", "b", _never, rates={"decode-4": [5.0, 20.0]})
    assert ratios(ours, peer) == {"decode-4": [2.0, 1.0]}
    rate = ours.record(PLAN, 1e9)["rates"]["decode-4"]
    assert rate == {"median": 20.0, "spread": 4.0, "repeats": [10.0, 20.0, 90.0]}


def test_the_decode_rate_is_that_of_timing() -> None:
    from tilewright.evaluate.measure.timing import figures
    from tilewright.runtime.request import Request

    times = (1.0, 3.0, 3.5, 4.5, 4.75)
    request = Request(0, (1, 2), output=[0] * 5, token_times=list(times))
    expected = figures([request], 0.0)
    generated = Generated((0,) * 5, times)
    assert Measure("decode-2", 2, 5).rate(generated) == expected.decode_tsu
    assert Measure("prefill-2", 2, 1).rate(generated) == expected.prefill_tps


@pytest.mark.parametrize("num_left, num_rates", [(0, 0), (3, 0), (4, 1), (7, 2)])
def test_one_that_fails_is_left_out(
    log: list[tuple[str, int, int]], num_left: int, num_rates: int
) -> None:
    broken, sound = FakeWorker("A", log, (10.0, 20.0)), FakeWorker("B", log, (10.0, 20.0))
    broken.num_left = num_left
    first, second = enter(broken), enter(sound)
    run([first, second])
    assert first.failure == "ended with SIGSEGV" and second.failure is None
    assert broken.is_closed and sound.is_closed
    assert len(first.rates.get("prefill-4", [])) == num_rates
    assert all(len(rates) == PLAN.num_rounds for rates in second.rates.values())
    record = first.record(PLAN, 1e9)
    assert record["failure"] == "ended with SIGSEGV"
    assert {len(each["repeats"]) for each in record["rates"].values()} <= {1, 2}


def test_one_that_cannot_start_is_left_out(log: list[tuple[str, int, int]]) -> None:
    missing = Contestant("peer", "x", _never)
    sound = enter(FakeWorker("B", log, (10.0, 20.0)))
    run([missing, sound])
    assert missing.failure == "not installed" and missing.loaded is None
    assert sound.failure is None and len(sound.rates) == 3
    assert missing.record(PLAN, 1e9)["bandwidth_share"] is None


def test_tokens_that_come_at_one_time_are_no_rate() -> None:
    class AtOnce(FakeWorker):
        def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
            return Generated((0,) * num_tokens, (1.0,) * num_tokens)

    contestant = enter(AtOnce("A", [], (1.0, 1.0)))
    run([contestant])
    assert contestant.failure == "gave several tokens at one time"


def test_workers_are_closed_when_it_is_interrupted(log: list[tuple[str, int, int]]) -> None:
    workers = [FakeWorker(name, log, (10.0, 20.0)) for name in "AB"]

    def interrupted() -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_all([enter(worker) for worker in workers], PLAN, tokens=TEXT, bandwidth=interrupted)
    assert all(worker.is_closed for worker in workers)


def test_several_users_are_measured_where_the_engine_serves_them() -> None:
    """Their tokens together; an engine of one user has the other figures alone."""

    class Together(FakeWorker):
        def generate(
            self, tokens: Sequence[int], num_tokens: int, *, num_users: int = 1
        ) -> Generated:
            self.log.append((self.name, num_users, num_tokens))
            return FakeWorker.generate(self, tokens, num_tokens)

    plan = Plan(prefill_lengths=(4,), context=4, num_decoded=20, num_rounds=2, users=(8, 32))
    log: list[tuple[str, int, int]] = []
    many, one = enter(Together("A", log, (10.0, 20.0))), enter(FakeWorker("B", [], (10.0, 20.0)))
    one.serves_many = False
    measure_all([many, one], plan, tokens=TEXT, bandwidth=lambda: 1.0)
    assert plan.max_users == 32 and PLAN.max_users == 1
    assert many.rates["decode-4-x8"] == pytest.approx([160.0] * 2)
    assert many.rates["decode-4-x32"] == pytest.approx([640.0] * 2)
    assert ("A", 8, 5) in log and ("A", 1, 20) in log
    assert set(one.rates) == {"prefill-4", "decode-4"}


def test_busy_processes_run_while_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with the measure; the share of the read rate is of decode alone."""
    others: list[int] = []

    class Counting(FakeWorker):
        def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            others.append(len(children))
            return FakeWorker.generate(self, tokens, num_tokens)

    monkeypatch.setattr("bench.peers.rounds._SPINNING_SECONDS", 0.0)
    before = len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
    plan = Plan(prefill_lengths=(), context=4, num_decoded=5, num_rounds=1, busy=(2,))
    found = enter(Counting("A", [], (10.0, 20.0)))
    measure_all([found], plan, tokens=TEXT, bandwidth=lambda: 1.0)
    assert [each - before for each in others] == [0, 0, 0, 2], "not while it warms up"
    assert set(found.rates) == {"decode-4", "decode-4-busy2"}
    assert found.record(plan, 40_000.0)["bandwidth_share"] == pytest.approx(0.5)


def test_no_round_is_begun_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """One at the least; then as many as fit where each takes as long as the longest before."""
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr("bench.peers.rounds.time.monotonic", lambda: float(next(clock)))
    for seconds, num_rounds in ((1.0, 1), (20.0, 2), (1000.0, 3)):
        plan = dataclasses.replace(PLAN, max_seconds=seconds)
        found = enter(FakeWorker("A", [], (10.0, 20.0)))
        readings = measure_all([found], plan, tokens=TEXT, bandwidth=lambda: 1.0)
        assert len(readings) == 1 + num_rounds
        assert {len(rates) for rates in found.rates.values()} == {num_rounds}


def test_the_context_has_room_for_every_measure() -> None:
    assert PLAN.max_context == 9
    assert Plan(prefill_lengths=(512,), context=128, num_decoded=4).max_context == 513


def _never() -> Callable[[], None]:
    raise WorkerError("not installed")
