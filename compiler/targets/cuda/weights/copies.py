"""Dequantized copies of weights in blocks or codes for cuBLAS.

A copy is e4m3 if a lofi weight is exact in e4m3, else bfloat16. Both preserve the values of blocks.
Values of codes are rounded to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import dequantise
from tilewright.compiler.targets.cuda.steps.buffers import padded
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.e4m3 import LEAST_LOFI, exact_rows
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_BYTES, PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import CudaTensorSpec, Weights, product_of
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp

_PIECES = 16
_LIBRARY_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Kinds:
    """Requested copies.

    Attributes:
        values: bfloat16 copies of weights in block formats.
        codes: e4m3 copies of bfp4 weights with lofi fidelity. They take precedence over ``values``.
        rounded: bfloat16 copies of weights in code tiles.
    """

    values: bool = False
    codes: bool = False
    rounded: bool = False


NO_COPIES = Kinds()
_NOTHING = (
    "--weight-copies {}: no weight is copied; with --compute fast there are copies of weights in "
    "blocks, and without a promise of rows' bits also of weights in codes, and in FP8 of bfp4 at "
    "lofi"
)


def kinds_for(options: CompileOptions) -> Kinds:
    """Return the copies that speed up a program with these options, if memory allows.

    Exact arithmetic uses no copies. Batch-invariant programs use no e4m3 and no rounded copies.
    """
    if options.compute == "exact" or options.copies == "none":
        return NO_COPIES
    values, is_fast = options.copies != "codes", not options.is_strict
    return Kinds(values=values, codes=is_fast, rounded=values and is_fast)


@dataclass(frozen=True, slots=True)
class DequantizedCopy:
    """A copy of a packed weight, with rows in the packed order.

    Attributes:
        values: bfloat16 ``[N, K]``, or e4m3 with ``scales``.
        scales: Row scales, float32 ``[N, 1]``. None: bfloat16.
    """

    values: Tensor
    scales: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size on the device in bytes."""
        values = self.values.untyped_storage().nbytes()
        return values + (0 if self.scales is None else self.scales.nbytes)


def is_lofi(each: LinearOp, *, decodes: bool) -> bool:
    """Return whether a matmul has lofi fidelity in a phase."""
    if each.compute is None:
        return False
    return (each.compute.decode if decodes else each.compute.prefill) == "lofi"


def wants_codes(each: LinearOp, kinds: Kinds) -> bool:
    """Return whether an e4m3 copy is requested and cuBLAS supports the weight's shape."""
    if not kinds.codes or product_of(each).kind != "bfp4":
        return False
    is_whole = all(size % _LIBRARY_MULTIPLE == 0 for size in each.weight.shape)
    return is_whole and (is_lofi(each, decodes=True) or is_lofi(each, decodes=False))


def wants_values(each: LinearOp, kinds: Kinds) -> bool:
    """Return whether a bfloat16 copy is requested."""
    name = product_of(each).kind
    return (kinds.values and name in TILE_BYTES) or (kinds.rounded and name in CODED_TILES)


def copy_bytes(plan: KernelProgram, kinds: Kinds) -> int:
    """Return the size of all copies in bytes, if all lofi weights are exact in e4m3."""
    found: dict[CudaTensorSpec, int] = {}
    for each in _products(plan):
        rows, columns = each.weight.shape
        if wants_codes(each, kinds):
            found[product_of(each)] = rows * (columns + 4)
        elif wants_values(each, kinds):
            found[product_of(each)] = 2 * rows * padded(columns)
    return sum(found.values())


def _products(plan: KernelProgram) -> Iterator[LinearOp]:
    return (each for each in plan.instructions if isinstance(each, LinearOp))


class DequantizedCopies:
    """The requested copies of packed weights.

    Attributes:
        num_lofi: Number of lofi weights tried.
        num_inexact: Number of lofi weights that are inexact in e4m3. They have no copy, and their
            matmuls use bfloat16.
    """

    def __init__(self, plan: KernelProgram, weights: Weights, kinds: Kinds) -> None:
        self._copies: dict[CudaTensorSpec, DequantizedCopy] = {}
        self.num_lofi = self.num_inexact = 0
        tried: set[CudaTensorSpec] = set()
        for each in _products(plan):
            wanted = product_of(each)
            if wanted in tried:
                continue
            tried.add(wanted)
            if wants_codes(each, kinds):
                copy = _codes(weights.packed(wanted))
                self.num_lofi += 1
                self.num_inexact += copy is None
                if copy is not None:
                    self._copies[wanted] = copy
            elif wants_values(each, kinds):
                self._copies[wanted] = DequantizedCopy(_dense(weights.packed(wanted)))

    @property
    def num_bytes(self) -> int:
        """Total size on the device in bytes."""
        return sum(each.num_bytes for each in self._copies.values())

    def said(self, requested: str = "auto") -> tuple[str, ...]:
        """Return notes about the copies for the user. Without copies, a note is returned only for
        ``requested``.
        """
        parts = []
        if self.num_lofi:
            exact = self.num_lofi - self.num_inexact
            parts.append(f"{exact} of {self.num_lofi} lofi weights, exact in e4m3, as such")
        rounded = sum(spec.kind in CODED_TILES for spec in self._copies)
        if values := sum(each.scales is None for each in self._copies.values()) - rounded:
            parts.append(f"{values} weights in blocks, in bf16")
        if rounded:
            parts.append(f"{rounded} weights in codes, rounded to bf16")
        if not parts:
            name = {"codes": "fp8", "all": "all"}.get(requested)
            return () if name is None else (_NOTHING.format(name),)
        size = f"{self.num_bytes / 1e9:.1f} GB"
        return (f"dequantized copies, for many rows: {', '.join(parts)}; {size}",)

    def codes_for(self, each: LinearOp, num_rows: int, *, decodes: bool) -> DequantizedCopy | None:
        """Return the e4m3 copy for a matmul with ``num_rows`` rows. None: the matmul does not use
        e4m3.
        """
        if num_rows < LEAST_LOFI or not is_lofi(each, decodes=decodes):
            return None
        copy = self._copies.get(product_of(each))
        return copy if copy is not None and copy.scales is not None else None

    def values_of(self, each: LinearOp) -> Tensor | None:
        """Return the bfloat16 copy of a matmul's weight, or None."""
        copy = self._copies.get(product_of(each))
        return None if copy is None or copy.scales is not None else copy.values


def _dense(packed: PackedWeight) -> Tensor:
    """Dequantize a weight as for a single matmul, so that cuBLAS gives the same bits."""
    shape = packed.num_rows, padded(packed.num_columns)
    values = torch.empty(shape, dtype=torch.bfloat16, device=packed.data.device)
    values = values[:, : packed.num_columns]
    dequantise(values, packed)
    return values


def _codes(packed: PackedWeight) -> DequantizedCopy | None:
    """Return the e4m3 copy, or None if inexact. Rows are converted in parts: scratch is 12 bytes a
    value.
    """
    dense, found = _dense(packed), []
    for part in dense.chunk(_PIECES):
        exact = exact_rows(part)
        if exact is None:
            return None
        found.append(exact)
    codes, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    return DequantizedCopy(codes, scales)
