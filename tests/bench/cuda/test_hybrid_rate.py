"""What measures a hybrid's steps beside experts, without a GPU: its mistakes and its ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench.cuda import hybrid_rate
from tests.bench.cuda.conftest import CheckMistake


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows 0", "--rows: '0'; allowed: integers, 1 to 256"),
        ("--heads 9 --key-heads 2", "--heads 9; allowed: multiples of 2"),
        ("--dim 96", "--dim 96; allowed: (64, 128)"),
        ("--hidden 200", "--hidden 200; allowed: multiples of 64"),
        ("", "no GPU"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(hybrid_rate.main, words, said)


def test_each_number_of_rows_has_the_ways_that_steps_of_so_many_may_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ways:
        layers = range(3)

        def __init__(self, options: Any, num_rows: int) -> None:
            self.num_rows = num_rows

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda layer, streams=None: ran.append((self.num_rows, name, streams))

    def timed(run: Callable[[int], None], chain: Sequence[int]) -> float:
        run(chain[0])
        return float(len(chain))

    ran: list[tuple[int, str, bool | None]] = []
    for name in ("Rule", "Router"):
        monkeypatch.setattr(hybrid_rate, name, Ways)
    monkeypatch.setattr(hybrid_rate, "need_gpu", lambda: None)
    monkeypatch.setattr(hybrid_rate, "replayed", timed)
    assert hybrid_rate.main(["--rows", "4", "5", "33", "65"]) == 0
    rule = [("run", False), ("run", True), ("scale", None)]
    router = [("product", None), ("apart", None), ("joined", None)]
    for num_rows, wanted in ((4, rule), (5, rule + router), (33, rule + router[:2]), (65, rule)):
        assert sorted({each[1:] for each in ran if each[0] == num_rows}, key=str) == sorted(
            wanted, key=str
        )
    tables = capsys.readouterr().out.split("\n\n")
    assert "| 4    | 3.00" in tables[0] and "| 33   | 12.00" in tables[1]
