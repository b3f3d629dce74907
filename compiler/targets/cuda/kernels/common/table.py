"""Op tables: kernel selection from format, arithmetic, compute capability and rows.

An op has one table. An entry has a kernel. Excludes launches and weights.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

EXACT, STRICT, FAST = ARITHMETICS = "exact", "strict", "fast"
"""Float32 arithmetic, batch-invariant arithmetic, and the fastest arithmetic."""

EVERY, NONE = range(1, 1 << 31), range(0)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the op tables see it. Tests build every GPU's tables on every machine.

    Attributes:
        capability: Compute capability. (0, 0) is a CPU with Triton's interpreter.
        why_no_cpp: Reason against CUDA C++ kernels. Empty: they run.
    """

    capability: tuple[int, int]
    why_no_cpp: str = ""

    @property
    def has_cpp(self) -> bool:
        """Whether CUDA C++ kernels run."""
        return not self.why_no_cpp

    @property
    def has_copy_engine(self) -> bool:
        """Whether Triton kernels fetch tiles by descriptors. The interpreter does."""
        return self.capability == (0, 0) or self.capability >= (9, 0)


MADE_FOR = "made for compute capability 9.0"
INTERPRETER, ADA, HOPPER = Gpu((0, 0), "no GPU"), Gpu((8, 9), MADE_FOR), Gpu((9, 0))


class Site(Protocol):
    """A plan's instruction in one phase, without its row count."""

    @property
    def gpu(self) -> Gpu:
        """The table's GPU."""

    @property
    def kind(self) -> str:
        """The format that the kernel reads."""

    @property
    def arithmetic(self) -> str:
        """`EXACT`, `STRICT` or `FAST`."""


S = TypeVar("S", bound=Site)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TableRow(Generic[S]):
    """A kernel with its conditions.

    Attributes:
        kernel: The kernel's name.
        formats: Formats that the kernel reads.
        rows: Range of rows with the best measured speed, or ranges.
        arithmetics: The kernel's arithmetics.
        is_cpp: Whether the kernel is CUDA C++ for compute capability 9.x.
    """

    kernel: str
    formats: tuple[str, ...]
    rows: Callable[[S], range | tuple[range, ...]] = lambda site: EVERY
    arithmetics: tuple[str, ...] = ARITHMETICS
    is_cpp: bool = False

    def rows_of(self, site: S) -> tuple[range, ...]:
        """Return the ranges of rows for this kernel."""
        is_there = site.arithmetic in self.arithmetics and site.kind in self.formats
        if not is_there or (self.is_cpp and not site.gpu.has_cpp):
            return ()
        found = self.rows(site)
        return tuple(filter(None, (found,) if isinstance(found, range) else found))


@dataclass(frozen=True, slots=True)
class Ranges(Generic[T]):
    """Values by rows: ``values[i]`` is for ``starts[i]`` rows up to the next start."""

    starts: tuple[int, ...]
    values: tuple[T, ...]

    def at(self, num_rows: int) -> T:
        """Return the value for a number of rows."""
        return self.values[bisect_right(self.starts, num_rows) - 1]

    def rows_with(self, value: T) -> tuple[range, ...]:
        """Return the ranges with a value."""
        stops = (*self.starts[1:], EVERY.stop)
        found = zip(self.starts, stops, self.values, strict=True)
        return tuple(range(start, stop) for start, stop, each in found if each == value)

    @classmethod
    def of(cls, found: Iterable[tuple[int, T]]) -> Ranges[T]:
        """Return ranges from starts in ascending order. Equal neighbors are joined."""
        starts, values = list[int](), list[T]()
        for start, value in found:
            if not values or values[-1] != value:
                starts.append(start)
                values.append(value)
        return Ranges(tuple(starts), tuple(values))


def bind(table: Sequence[TableRow[S]], site: S) -> Ranges[str]:
    """Return a site's kernels. The first matching table row gives the kernel for a row count."""
    found = [(row.kernel, rows) for row in table for rows in row.rows_of(site)]
    bounds = {1} | {bound for _, rows in found for bound in (rows.start, rows.stop)}
    return Ranges.of(
        (start, next(kernel for kernel, rows in found if start in rows))
        for start in sorted(bounds - {EVERY.stop})
    )
