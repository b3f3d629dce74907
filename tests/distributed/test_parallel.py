"""What of a group of ranks is refused before any model is looked at."""

from __future__ import annotations

import pytest

from tests.tiny import precision_of, tiny_model
from tilewright.compiler.driver import compile_model
from tilewright.compiler.mesh import UNEVEN, in_shares
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import ConfigError


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelConfig(0), "0 ranks; allowed: 1 or more"),
        (ParallelConfig(6, expert=4), "experts over 4 parts of 6 ranks; allowed: 1, 2, 3, 6"),
        (ParallelConfig(2, shares=(1, 1, 1)), "3 shares for 2 ranks; allowed: one a rank"),
        (ParallelConfig(2, shares=(1, 0)), "shares 1,0; allowed: whole numbers from 1"),
        (ParallelConfig(2, devices=(1, 1)), "devices 1,1; allowed: numbers from 0, each once"),
        (
            ParallelConfig(2, wire="bf17"),
            "wire 'bf17'; allowed: fp32, bf16, q80; did you mean 'bf16'?",
        ),
        (
            ParallelConfig(2, exchange="ncll"),
            "exchange 'ncll'; allowed: peers, nccl; did you mean 'nccl'?",
        ),
        (ParallelConfig(2, peer_limit=0.0), "a limit of 0.0 seconds; allowed: more than 0"),
    ],
)
def test_bad_groups_are_refused(parallel: ParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compile_model(
            tiny_model(), precision_of(), target="null", options=CompileOptions(parallel=parallel)
        )
    assert str(caught.value) == message


def test_the_policy_follows_the_shares() -> None:
    assert ParallelConfig(3).policy == UNEVEN
    assert ParallelConfig(2, shares=(2, 1)).policy == in_shares((2, 1))
    ParallelConfig(2, expert=2, shares=(2, 1), wire="q80", devices=(1, 0)).check()
