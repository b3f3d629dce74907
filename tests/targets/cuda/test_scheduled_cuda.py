"""The scheduler over cuda's kernels: shared pages, choices, and state that went to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.targets.cuda.test_conformance_cuda import SMALL
from tests.targets.cuda.test_executable import BF16
from tests.targets.test_scheduled import alone, request
from tests.tiny import compiled, random_tokens, tiny_model
from tilewright.compiler.targets.interface.base import Executable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import SchedulerConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def executable() -> Executable:
    options = {"max_batch": 3, "max_context": 128, "compute": "fast"}
    return compiled(tiny_model(std=0.2, **SMALL), "cuda", precision=BF16, **options)


def test_shared_pages_and_choices_are_answered_as_if_they_were_alone(
    executable: Executable,
) -> None:
    loop = EngineLoop(executable)
    shared = random_tokens(64, seed=1)
    first, second = request([*shared, 5], seed=1), request([*shared, 9, 3], seed=2)
    other = request(second.prompt, seed=3, like=second)
    loop.generate([first])
    loop.generate([second, other])
    assert [each.num_cached for each in (first, second, other)] == [0, 64, 66]
    for each in (first, second, other):
        assert each.output == alone(executable, each)
    executable.close()


@pytest.mark.parametrize("host_bytes", [0, 1 << 30])
def test_one_that_lost_its_pages_goes_on_where_it_was(
    executable: Executable, host_bytes: int
) -> None:
    both = [request(random_tokens(60, seed=seed), seed=seed, wanted=8) for seed in (5, 6)]
    answers = [alone(executable, each) for each in both]
    executable.capabilities = replace(executable.capabilities, num_pages=3)
    loop = EngineLoop(executable, policy=SchedulerConfig(host_bytes=host_bytes, reuses=False))
    loop.generate(both)
    assert [each.num_preemptions > 0 for each in both] == [False, True]
    assert [each.output for each in both] == answers
    executable.close()
