"""Memory behind reserved addresses, with a driver that only keeps accounts."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.engine_generator.parts import pages
from tilewright.compiler.targets.cuda.engine_generator.parts.pages import Addresses, Rows

MB = 1 << 20
FIRST = 1 << 40


class Driver:
    """Two MB a granule and ``room`` bytes in all. ``mapped``: sizes by address."""

    def __init__(self, room: int = 64 * MB) -> None:
        self.room, self.mapped, self.handles = room, dict[int, int](), dict[int, int]()
        self.reserved, self.waits = 0, 0

    def __getattr__(self, name: str) -> Any:
        """``cuMemMap`` is `mem_map`."""
        return getattr(self, re.sub("(?<!^)(?=[A-Z])", "_", name.removeprefix("cu")).lower())

    def mem_get_allocation_granularity(self, granule: Any, kind: Any, option: int) -> int:
        assert list(kind) == [1, 1 | 3 << 32, 0, 0] and option == 0
        granule._obj.value = 2 * MB
        return 0

    def mem_address_reserve(self, place: Any, size: Any, *zeros: Any) -> int:
        assert [each.value for each in zeros] == [0, 0, 0]
        place._obj.value, self.reserved = FIRST, size.value
        return 0

    def mem_create(self, handle: Any, size: Any, kind: Any, flags: Any) -> int:
        if sum(self.mapped.values()) + size.value > self.room:
            return 2
        handle._obj.value = len(self.handles) + 1
        self.handles[handle._obj.value] = size.value
        return 0

    def mem_map(self, place: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert self.handles[handle.value] == size.value and place.value not in self.mapped
        assert place.value >= FIRST and place.value + size.value <= FIRST + self.reserved
        self.mapped[place.value] = size.value
        return 0

    def mem_release(self, handle: Any) -> int:
        return int(self.handles.pop(handle.value, 0) == 0)

    def mem_set_access(self, place: Any, size: Any, access: Any, count: Any) -> int:
        assert (list(access), count.value) == ([1, 3, 3], 1)
        return int(self.mapped[place.value] != size.value)

    def mem_unmap(self, place: Any, size: Any) -> int:
        return int(self.mapped.pop(place.value) != size.value)

    def mem_address_free(self, place: Any, size: Any) -> int:
        assert (place.value, size.value, self.mapped) == (FIRST, self.reserved, {})
        self.reserved = 0
        return 0


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Addresses, Driver]]:
    driver = Driver()

    def wait(device: torch.device) -> None:
        driver.waits += 1

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(pages, "driver", lambda: driver)
    return lambda limit: (Addresses(limit, torch.device("cuda", 3)), driver)


def test_memory_grows_in_place_by_granules_and_ends_with_its_owner(reserve: Any) -> None:
    addresses, driver = reserve(100 * MB + 1)
    assert driver.reserved == 102 * MB and driver.mapped == {}
    assert addresses.__cuda_array_interface__["data"] == (FIRST, False)
    assert addresses.__cuda_array_interface__["shape"] == (102 * MB,)
    for size in (1, 2 * MB, 3 * MB, 9 * MB):
        addresses.grow(size)
    assert driver.mapped == {FIRST: 2 * MB, FIRST + 2 * MB: 2 * MB, FIRST + 4 * MB: 6 * MB}
    assert driver.handles == {} and driver.waits == 1
    addresses.shrink()
    assert driver.mapped == {FIRST: 2 * MB} and driver.waits == 2  # kernels have ended before
    addresses.grow(4 * MB)
    gc.disable()
    try:
        del addresses
        assert (driver.mapped, driver.reserved) == ({}, 0)
    finally:
        gc.enable()


def test_a_full_device_changes_nothing(reserve: Any) -> None:
    addresses, driver = reserve(100 * MB)
    addresses.grow(60 * MB)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate: CUDA error 2"):
        addresses.grow(70 * MB)
    addresses.grow(64 * MB)
    assert sum(driver.mapped.values()) == 64 * MB


def test_rows_are_the_lowest_free_ones_and_leave_spare_ones() -> None:
    rows = Rows(4, 2, 64, torch.device("cpu"))
    found = rows.tensor((4, 2), torch.float16)
    place = found.data_ptr()
    assert rows.take(3) == [0, 1, 2] and rows.size == 4
    rows.give([1])
    assert rows.take(1, spare=3) == [1] and rows.size == 6
    assert rows.take(2) == [3, 4]  # a decode step takes what is spare
    assert rows.size == 6 and found[5].abs().max() == 0
    rows.give([0, 1, 2, 3])
    assert rows.size == 6
    rows.give([4])
    assert rows.size == 4 and rows.take(4) == [0, 1, 2, 3] and found.data_ptr() == place


def test_rows_end_at_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_ROWS", 5)
    rows = Rows(2, 2, 64, torch.device("cpu"))
    assert rows.take(4, spare=9) == [0, 1, 2, 3]
    with pytest.raises(torch.OutOfMemoryError, match="4 rows are in use, no memory for more"):
        rows.take(2)
    assert rows.take(1) == [4]
