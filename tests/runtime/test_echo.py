"""Log probabilities of prompts in the loop: pieces, preemption, and company change none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runtime.random_logits import RandomLogits
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling import prefill_scheduler as dealing
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

PROMPT = tuple((7 * at) % 256 for at in range(30))


def echoing(prompt: tuple[int, ...] = PROMPT, **more: int) -> RequestState:
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=2, **more)
    return RequestState(len(prompt), prompt, sampling)


def expected(prompt: tuple[int, ...]) -> list[float]:
    rows = [RandomLogits()._logits(list(prompt[:end])) for end in range(1, len(prompt))]
    logs = torch.from_numpy(np.stack(rows)).double().log_softmax(-1)
    return [float(logs[at, token]) for at, token in enumerate(prompt[1:])]


@pytest.mark.parametrize("piece", [1, 4, 29, 30, 64])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_token_but_the_first_is_scored_whatever_the_pieces(
    piece: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dealing, "_MAX_ECHOED", piece)
    loop = EngineLoop(RandomLogits(runs_ahead=ahead), policy=SchedulerConfig(step_tokens=40))
    made = [echoing(), echoing(PROMPT[:9], logprobs=1), RequestState(0, PROMPT)]
    loop.generate(made)
    for one in made[:2]:
        found = [each.chosen for each in one.prompt_logprobs]
        assert found == pytest.approx(expected(one.prompt))
        assert all(len(each.top) == 2 for each in one.prompt_logprobs)
    assert not made[2].prompt_logprobs and not made[0].logprobs and len(made[1].logprobs) == 3


def test_a_prompt_that_is_scored_is_computed_whole_and_again_after_a_loss() -> None:
    loop = EngineLoop(RandomLogits(), policy=SchedulerConfig(step_tokens=8))
    loop.generate([RequestState(0, PROMPT)])
    one = echoing()
    loop.add(one)
    for _ in range(2):
        loop.step()
    assert len(one.prompt_logprobs) == 16
    loop.scheduler.evacuate()
    loop.executable.reset()
    loop.generate([])
    assert one.num_cached == 0
    assert [each.chosen for each in one.prompt_logprobs] == pytest.approx(expected(PROMPT))
