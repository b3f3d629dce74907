"""An engine's file beside its target, on a CPU: the same weights, in turn, in processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine import beside
from bench.engine.beside import FILE, TARGET, Rates, Side
from bench.engine.command import main
from tilewright.errors import TilewrightError

SIDE = Side(
    engine=None,
    shape="tiny-hybrid",
    device="cpu",
    users=(1, 3),
    prompt_length=12,
    tokens=5,
    repeats=2,
)


def here(name: str, side: Side) -> tuple[float, list[Rates]]:
    """What a child measures, in this process."""
    made_s, *found = beside.measure_side(side)
    assert isinstance(made_s, float) and (side.engine is None) == (name == TARGET)
    return made_s, [each for each in found if isinstance(each, Rates)]


def test_both_sides_have_the_same_weights_and_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each user's first token says so: it is the likeliest of all."""
    monkeypatch.setattr(beside, "_in_child", here)
    kept = list[dict[str, Any]]()
    engine = str(beside.write_engine(SIDE.shape, tmp_path))
    sides = {TARGET: SIDE, FILE: replace(SIDE, engine=engine)}
    beside.compare(sides, rounds=2, keep=kept.append)
    assert [[len(each[name]) for name in sides] for each in kept] == [
        [2, 0],
        [2, 2],
        [4, 2],
        [4, 4],
    ]
    last = kept[-1]
    assert [each["users"] for each in last[FILE]] == [1, 3, 1, 3]
    assert [each["firsts"] for each in last[FILE]] == [each["firsts"] for each in last[TARGET]]
    assert all(len(each["rates"]) == 2 and min(each["rates"]) > 0 for each in last[FILE])
    said = capsys.readouterr().out
    assert said.index("round 1, target: 1 user ") < said.index("round 1, file: 1 user ")
    assert "shape:tiny-hybrid (random weights), the same in both; cpu" in said
    assert "1 of 1" in said and "3 of 3" in said


def test_rates_are_of_all_rounds() -> None:
    found = {
        TARGET: [Rates(2, [100.0, 90.0], [5, 6]), Rates(2, [110.0, 100.0], [5, 6])],
        FILE: [Rates(2, [97.0, 80.0], [5, 7]), Rates(2, [97.0, 99.0], [5, 7])],
    }
    pair = beside._Pair.of(2, found)
    assert [each(pair) for each in beside.COLUMNS.values()] == [
        *("2", "100.0 (90.0 to 110.0)", "97.0 (80.0 to 99.0)", "97.0 %", "1 of 2")
    ]


def test_steps_behind_the_first_are_timed() -> None:
    """So that the rate is that of `timing.figures`."""

    class Engine:
        steps = 0

        def prefill(self, ids: list[int], prompts: list[torch.Tensor]) -> torch.Tensor:
            return torch.eye(4)[[len(prompt) for prompt in prompts]]

        def decode(self, ids: list[int], tokens: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return torch.eye(4)[tokens]

        def remove(self, ids: list[int]) -> None:
            self.removed = ids

    engine, seen = Engine(), list[int]()
    prompts = [torch.zeros(count, dtype=torch.int64) for count in (3, 1)]
    rate, firsts = beside._answer(engine, prompts, 6, wait=lambda: seen.append(engine.steps))
    assert firsts == [3, 1] and seen == [1, 5] and rate > 0 and engine.removed == [0, 1]


def test_a_side_is_a_process_whose_mistakes_are_one_line() -> None:
    side = replace(SIDE, shape="tiny", prompt_length=1_000_000)
    with pytest.raises(TilewrightError, match=r"the target: exit code 2: context of 1000005 pos"):
        beside._in_child(TARGET, side)


def test_a_process_writes_a_line_for_each_number_of_users(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [1.5, Rates(1, [2.0], [3])]
    seen = list[Side]()
    monkeypatch.setattr(beside, "measure_side", lambda side: seen.append(side) or iter(found))
    assert beside.main([json.dumps(beside.asdict(SIDE))]) == 0
    assert seen == [SIDE]
    made_s, rates = map(json.loads, capsys.readouterr().out.splitlines())
    assert [made_s, Rates(**rates)] == found


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tiny"], "--beside-target 'tiny'; allowed: shape:NAME"),
        (["shape:nowhere"], "unknown shape 'nowhere'"),
        (["shape:tiny", "--device", "cuda:1"], "--device 'cuda:1'; allowed beside a target"),
        (["shape:tiny", "--tokens", "2"], "'2'; allowed: integers, 3 to"),
    ],
)
def test_mistakes_are_refused(argv: list[str], said: str) -> None:
    with pytest.raises(TilewrightError, match=said):
        main(["--beside-target", *argv])
