"""Op table of dense matmuls: kernel selection by weight and rows. Excludes launches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.compiler.targets.cuda.kernels.matmul import dense as native_dense
from tilewright.compiler.targets.cuda.kernels.matmul import linear as native
from tilewright.compiler.targets.cuda.kernels.matmul import wide as native_wide
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.e4m3 import LEAST_LOFI
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES, HeldWeight

GEMV, DENSE, BLOCK, E4M3 = "gemv", "dense", "block", "e4m3"
CUBLAS, TRITON = "cublas", "triton"
EXACT, STRICT, FAST = "exact", "strict", "fast"

_EVERY, _NONE = range(1, 1 << 31), range(0)
_BLOCKS = tuple(TILE_BYTES)
_FORMATS = ("bf16", *_BLOCKS)


@dataclass(frozen=True, slots=True)
class MatmulSite:
    """A matmul of a plan in one phase, without its number of rows.

    Attributes:
        weight: Packed weight. Only format and shape are read.
        decodes: Whether this is a decode step.
        arithmetic: ``exact``, ``strict`` or ``fast``.
        kernels: Available kernels for the device and the weight.
        has_values: Whether a bfloat16 copy exists.
        has_codes: Whether an e4m3 copy exists and the fidelity of the phase permits it.
        has_one_order: Whether `GEMV` gives a row the same bits in all strict decode steps.
    """

    weight: HeldWeight
    decodes: bool
    arithmetic: str
    kernels: frozenset[str]
    has_values: bool = False
    has_codes: bool = False
    has_one_order: bool = False


@dataclass(frozen=True, slots=True)
class MatmulRow:
    """A table row: a kernel and the range of rows with the best measured speed."""

    kernel: str
    arithmetics: tuple[str, ...]
    formats: tuple[str, ...]
    rows: Callable[[MatmulSite], range]

    def rows_of(self, site: MatmulSite) -> range:
        """Return the range of rows for this kernel."""
        is_there = self.kernel in site.kernels and site.arithmetic in self.arithmetics
        return self.rows(site) if is_there and site.weight.kind in self.formats else _NONE


@dataclass(frozen=True, slots=True)
class KernelRanges:
    """Kernels by rows: ``kernels[i]`` takes from ``starts[i]`` rows to the next start."""

    starts: tuple[int, ...]
    kernels: tuple[str, ...]

    def kernel(self, num_rows: int) -> str:
        """Return the kernel for a number of rows."""
        return self.kernels[bisect_right(self.starts, num_rows) - 1]


def _library_rows(site: MatmulSite) -> range:
    """cuBLAS on a bfloat16 copy is faster than `BLOCK` from this number of rows."""
    least = tuning()["matmul"]["library_min_rows"]
    is_uncut = site.weight.num_rows >= 16 * native.UNCUT_TILES
    return range(least["uncut" if is_uncut else "cut"], _EVERY.stop) if site.has_values else _NONE


def _gemv_rows(site: MatmulSite) -> range:
    """Decode steps launch several times: strict steps always, fast steps for large weights."""
    held, most = site.weight, native.most_tokens(site.weight)
    if site.decodes and site.arithmetic == STRICT:
        return _EVERY
    if not site.decodes or held.kind == "bf16":
        return range(1, most + 1)
    limits = tuning()["matmul"]["gemv_parts"]
    if held.num_rows > limits["max_dequantized_out_features"]:
        return _EVERY
    is_large = native.num_slices(held) == 1 or held.num_columns > limits["min_in_features"]
    return range(1, (max(most, limits["max_rows"]) if is_large else most) + 1)


MATMUL = (
    MatmulRow(
        E4M3,
        (EXACT, FAST),
        ("bfp4",),
        lambda site: range(LEAST_LOFI, _EVERY.stop) if site.has_codes else _NONE,
    ),
    MatmulRow(DENSE, (FAST,), ("bf16",), lambda site: native_dense.rows_of(site.weight)),
    MatmulRow(CUBLAS, (EXACT,), _FORMATS, lambda site: _EVERY),
    MatmulRow(
        CUBLAS,
        (STRICT,),
        _FORMATS,
        lambda site: _NONE if site.decodes and site.has_one_order else _EVERY,
    ),
    MatmulRow(CUBLAS, (FAST,), _BLOCKS, _library_rows),
    MatmulRow(
        BLOCK,
        (STRICT, FAST),
        _BLOCKS,
        lambda site: native_wide.rows_of(site.weight, same_bits=site.arithmetic == STRICT),
    ),
    MatmulRow(GEMV, (STRICT, FAST), _FORMATS, _gemv_rows),
    MatmulRow(TRITON, (STRICT, FAST), _FORMATS, lambda site: range(1, native.MAX_TOKENS + 1)),
    MatmulRow(CUBLAS, (STRICT, FAST), _FORMATS, lambda site: _EVERY),
)
"""Selection order: the first table row with a matching range gives the kernel."""


def bind_kernels(site: MatmulSite) -> KernelRanges:
    """Return the kernel ranges for a matmul."""
    found = [(row.kernel, row.rows_of(site)) for row in MATMUL]
    bounds = {1} | {bound for _, rows in found if rows for bound in (rows.start, rows.stop)}
    starts, kernels = list[int](), list[str]()
    for start in sorted(bounds - {_EVERY.stop}):
        kernel = next(kernel for kernel, rows in found if start in rows)
        if not kernels or kernels[-1] != kernel:
            starts.append(start)
            kernels.append(kernel)
    return KernelRanges(tuple(starts), tuple(kernels))
