"""Step times exclude captures. Mixed batches are measured after late captures."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tests.runtime.queued import Clock, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel
from tilewright.runtime.speculative.config import SpeculativeConfig


class Capturing(QueuedExecutable):
    """Captures a step of each batch size at its first use, in 5 s. A step takes 1 ms.

    ``left``: Captures for idle time.
    """

    num_captures, left = 0, 0

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.captured: set[int] = set()

    def step(self, step: Step) -> StepOutput:
        size = len(step.decode) + len(step.drafts)
        if size not in self.captured:
            self.captured.add(size)
            self.num_captures += 1
            self.clock.now += 5.0
        self.clock.now += 1e-3
        return super().step(step)

    @property
    def is_prepared(self) -> bool:
        return not self.left

    def prepare_next(self) -> None:
        self.left -= 1
        self.num_captures += 1


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_cost_step_with_a_capture_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, runs_ahead: bool
) -> None:
    executable, times = Capturing(clock=(clock := Clock()), runs_ahead=runs_ahead), list[float]()
    monkeypatch.setattr(StepCostModel, "measure", lambda *values, **facts: times.append(values[3]))
    monkeypatch.setattr(loop_module.time, "perf_counter", clock)
    loop = EngineLoop(executable, policy=SchedulerConfig(reuses=False))
    loop.warm_up()
    sampling = SamplingParams(max_tokens=30)
    loop.generate([RequestState(at, (at,), sampling) for at in range(4)])
    assert clock.now > 5.0 * executable.num_captures > 10.0
    assert max(times) < 10.0 < len(times)


def test_loop_late_captures_mixed_batches_are_measured_after_them() -> None:
    """With drafts, too. The statistics do not change."""
    executable = Capturing(passes=((4, (64,)),), max_drafts=3)
    executable.left = 2
    policy = SchedulerConfig(speculative=SpeculativeConfig(max_drafts=3))
    loop = EngineLoop(executable, policy=policy)
    loop.warm_up()
    loop.generate([RequestState(0, (0,) * 9, SamplingParams(max_tokens=20))])
    stats, counts = deepcopy(loop.stats.found), deepcopy(loop.scheduler.speculator.counts)
    for _ in range(3):
        assert not loop.is_prepared and loop.cost.shared(3, 4) is None
        loop.prepare_next()
    assert loop.is_prepared and loop.cost.shared(3, 4) is not None and not executable.num_open
    assert loop.stats.found == stats and loop.scheduler.speculator.counts == counts
    loop.warm_up()
    assert loop.is_prepared, "nothing is left"
