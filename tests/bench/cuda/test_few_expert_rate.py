"""What measures experts of few rows, without a GPU: its mistakes, and that it has what runs."""

from __future__ import annotations

import pytest

from bench.cuda import few_expert_rate
from tests.bench.cuda.conftest import CheckMistake
from tilewright.compiler.targets.cuda.kernels.experts.experts_few import DEPTHS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rows 0", "--rows: '0'; allowed: integers, 1 to 64"),
        ("--hidden 200", "--hidden 200; allowed: multiples of 128"),
        ("--top-k 9 --experts 8", "--top-k 9; allowed: up to --experts 8"),
        ("", "no GPU"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(few_expert_rate.main, words, said)


@pytest.mark.parametrize("kind", sorted(DEPTHS))
def test_what_runs_is_among_what_is_measured(kind: str) -> None:
    others, few = few_expert_rate.Way(0, 0), few_expert_rate.Way(*DEPTHS[kind])
    within = few_expert_rate.Way(*DEPTHS[kind], is_inside=True)
    found = [few_expert_rate.ways_of(kind, count) for count in (1, 2, 3)]
    assert found == [[others, few, within], [others, few], [others]]
