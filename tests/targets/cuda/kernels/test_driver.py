"""Copies and events by the CUDA driver: arguments, and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tilewright.compiler.targets.cuda.kernels.common import driver


class Function:
    """Replaces a function of the driver."""

    def __init__(self) -> None:
        self.error, self.calls = 0, list[tuple[int, ...]]()

    def __call__(self, *given: int) -> int:
        self.calls.append(given)
        return self.error


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventRecord"
    made = SimpleNamespace(**{name: Function() for name in names})
    driver._library.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda name: made)
    yield made
    driver._library.cache_clear()


def test_calls_have_the_order_of_the_driver(library: Any) -> None:
    high = 1 << 40
    driver.copy_to_host(high, high + 8, 16, 3)
    driver.copy_to_device(high + 8, high, 24, 0)
    driver.record(high, 3)
    assert library.cuMemcpyDtoHAsync_v2.calls == [(high, high + 8, 16, 3)]
    assert library.cuMemcpyHtoDAsync_v2.calls == [(high + 8, high, 24, 0)]
    assert library.cuEventRecord.calls == [(high, 3)]
    assert len(library.cuMemcpyDtoHAsync_v2.argtypes) == 4


def test_errors_have_the_number_of_the_driver(library: Any) -> None:
    library.cuEventRecord.error = 700
    with pytest.raises(RuntimeError, match="CUDA: error 700"):
        driver.record(1, 2)
