"""What a scheduler shares, copies and swaps where state is really held: the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.models import test_qwen3_5, test_qwen3_5_moe
from tests.tiny import compiled, precision_of, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

HYBRID: dict[str, Any] = {"model_type": "qwen3_5", **test_qwen3_5.ON_CUDA}
EXPERTS: dict[str, Any] = {"model_type": "qwen3_5_moe", **test_qwen3_5_moe.ON_CUDA}


def made(target: str, *, hybrid: bool = False, **options: Any) -> Executable:
    linear = EXPERTS if target == "cpu-native" else HYBRID
    model = tiny_model(std=0.3, **(linear if hybrid else {}))
    chosen: dict[str, Any] = {"max_batch": 3, "max_context": 192, "compute": "exact", **options}
    return compiled(model, target, precision=precision_of("bf16"), **chosen)


def request(prompt: Sequence[int], *, seed: int = 0, wanted: int = 3, **facts: Any) -> RequestState:
    sampling = SamplingParams(max_tokens=wanted, seed=seed, temperature=1.0)
    return RequestState(seed, tuple(prompt), sampling, **facts)


def alone(executable: Executable, one: RequestState) -> list[int]:
    """What a request is answered where nothing is shared."""
    again = RequestState(0, one.prompt, one.sampling)
    EngineLoop(executable, policy=SchedulerConfig(reuses=False)).generate([again])
    return again.output


TARGETS = [("reference", True), ("cpu", False), ("cpu", True), ("cpu-native", True)]
"""And whether its layers have linear attention."""


@pytest.mark.parametrize(("target", "hybrid"), TARGETS)
def test_a_later_prompt_computes_what_is_new_and_choices_compute_nothing(
    target: str, hybrid: bool
) -> None:
    executable = made(target, hybrid=hybrid)
    loop = EngineLoop(executable)
    shared = random_tokens(70, seed=1)
    first = request([*shared, 5, 6], seed=1)
    second = request([*shared, 9], seed=2)
    others = [request(second.prompt, seed=seed, like=second) for seed in (3, 4)]
    for each in ([first], [second, *others]):
        loop.generate(each)
    assert (first.num_cached, second.num_cached) == (0, 64 if hybrid else 70)
    assert [each.num_cached for each in others] == [71, 71]
    for each in (first, second, *others):
        assert each.output == alone(executable, each)
    executable.close()


@pytest.mark.parametrize("target", ["reference", "cpu", "cpu-native"])
def test_turns_of_a_hybrid_s_chat_go_on_from_snapshots(target: str) -> None:
    """The template drops what was thought, so the slot's own end is of no use."""
    executable = made(target, hybrid=True)
    loop, said = EngineLoop(executable), tuple(random_tokens(66, seed=3))
    found, answers = [], []
    for turn in range(3):
        one = request(said, seed=turn)
        loop.generate([one])
        answers.append((one, one.output))
        found.append(one.num_cached)
        said = (*said, *one.output[1:], *random_tokens(40, seed=10 + turn))
    assert found == [0, 64, 64]
    assert all(output == alone(executable, one) for one, output in answers)
    executable.close()
