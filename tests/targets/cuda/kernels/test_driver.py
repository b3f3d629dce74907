"""Copies and events by the CUDA driver: arguments, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.compiler.targets.cuda.kernels.common import driver


class Function:
    """Replaces a function of the driver. Returns its errors in turn, then 0."""

    def __init__(self) -> None:
        self.errors, self.calls = list[int](), list[tuple[int, ...]]()

    def __call__(self, *given: int) -> int:
        self.calls.append(given)
        return self.errors.pop(0) if self.errors else 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuGraphLaunch"
    made = SimpleNamespace(**{name: Function() for name in names}, devices=[])
    driver._library.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda name: made)
    replaced = SimpleNamespace(
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda device: 3 + device),
        device=lambda kind, index: index,
        zeros=lambda count, device: made.devices.append(device),
    )
    monkeypatch.setattr(driver, "torch", replaced)
    yield made
    driver._library.cache_clear()


def test_calls_have_the_order_of_the_driver(library: Any) -> None:
    high = 1 << 40
    driver.copy_to_host(high, high + 8, 16, event=high + 16, device=1)
    driver.copy_to_device(high + 8, high, 24, device=0)
    driver.launch_graph(high, device=1)
    assert library.cuMemcpyDtoHAsync_v2.calls == [(high, high + 8, 16, 4)]
    assert library.cuEventRecord.calls == [(high + 16, 4)]
    assert library.cuMemcpyHtoDAsync_v2.calls == [(high + 8, high, 24, 3)]
    assert library.cuGraphLaunch.calls == [(high, 4)]
    assert len(library.cuMemcpyDtoHAsync_v2.argtypes) == 4 and not library.devices


def test_a_thread_without_a_context_gets_it(library: Any) -> None:
    library.cuGraphLaunch.errors = [201]
    driver.launch_graph(8, device=1)
    assert library.cuGraphLaunch.calls == [(8, 4)] * 2 and library.devices == [1]


def test_errors_have_the_number_of_the_driver(library: Any) -> None:
    library.cuEventRecord.errors, library.cuMemcpyHtoDAsync_v2.errors = [700], [201, 201]
    with pytest.raises(RuntimeError, match="CUDA: cuEventRecord: error 700"):
        driver.copy_to_host(1, 2, 3, event=4, device=0)
    with pytest.raises(RuntimeError, match="CUDA: cuMemcpyHtoDAsync_v2: error 201"):
        driver.copy_to_device(1, 2, 3, device=0)
