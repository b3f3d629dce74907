"""Ceilings are measured: positive, of this device, and on a GPU near what its makers say."""

from __future__ import annotations

import pytest
import torch

from tilewright.errors import CompileError
from tilewright.evaluate.measure.ceilings import cpu_ceilings, measure_ceilings, read_bandwidth


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_read_rate_is_measured(num_threads: int) -> None:
    rate = read_bandwidth(num_threads, num_bytes=16 * 2**20)
    assert 1e8 < rate < 1e13


def test_the_cpu_s_are_measured() -> None:
    found = cpu_ceilings(1, num_bytes=1 << 22)
    assert "1 threads" in found.device and found.product_type == "fp32"
    assert len(found.reads) == len(found.products) == 3
    assert found.bytes_per_s > 1e8 and found.flops_per_s > 1e8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_none_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CompileError, match="no GPU"):
        measure_ceilings("cuda")


@pytest.mark.gpu
def test_the_gpu_s_are_measured() -> None:
    """Rates that a GPU could have, the best of each: others may use the device, and a processor
    that is busy launches late.
    """
    before = torch.cuda.memory_reserved()  # of tests before this one
    found = measure_ceilings("cuda")
    assert found.device == torch.cuda.get_device_name() and found.product_type == "bf16"
    assert len(found.reads) > 2 < len(found.products)
    assert min(found.reads) > 0 and 1e11 < max(found.reads) < 1e13
    assert min(found.products) > 0 and 1e13 < max(found.products) < 1e16
    assert torch.cuda.memory_reserved() - before < 1 << 30, "the buffers are given back"
