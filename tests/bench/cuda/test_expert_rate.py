"""What measures products with experts, without a GPU: its mistakes, and that its tilings exist."""

from __future__ import annotations

import pytest
import torch

from bench.cuda import expert_rate
from tests.bench.cuda.conftest import CheckMistake
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import MOST_PAIRS, tiling_of
from tilewright.compiler.targets.cuda.weights.packed_weight import HeldWeight


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tokens 0", "--tokens: '0'; allowed: integers, 1 or more"),
        ("--top-k 9 --experts 8", "--top-k 9; allowed: up to --experts 8"),
        ("", "no GPU"),
    ],
)
def test_mistakes_are_one_line_and_2(words: str, said: str, check_mistake: CheckMistake) -> None:
    check_mistake(expert_rate.main, words, said)


def test_what_runs_is_among_what_is_measured() -> None:
    held = HeldWeight("bf16", 1024, 2048, torch.empty(0), num_experts=256)
    large = tiling_of(held, MOST_PAIRS, torch.bfloat16)
    assert (MOST_PAIRS, large) in expert_rate.TILINGS
