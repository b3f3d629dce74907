"""Step times exclude captures."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runtime.queued import Clock, QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.runtime import loop as loop_module
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel


class Capturing(QueuedExecutable):
    """Captures a step of each batch size at its first use, in 5 s. A step takes 1 ms."""

    num_captures = 0

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
