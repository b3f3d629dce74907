"""The read rate of memory: a plausible number, from as many threads as are asked for."""

from __future__ import annotations

import pytest

from bench.bandwidth import read_bandwidth


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rate_is_measured(num_threads: int) -> None:
    rate = read_bandwidth(num_threads, num_bytes=16 * 2**20)
    assert 1e8 < rate < 1e13
