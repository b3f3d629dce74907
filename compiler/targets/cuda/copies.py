"""Weights in block formats that are held a second time, as the library reads them: e4m3 codes where
a lofi weight is exact in them, bfloat16 values. Both are the format's own values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.e4m3 import LEAST_LOFI, exact_rows
from tilewright.compiler.targets.cuda.held import TILE_BYTES, TILE_ROWS, HeldWeight
from tilewright.compiler.targets.cuda.kernels import native, native_lofi
from tilewright.compiler.targets.cuda.kernels.dequantise import dequantise
from tilewright.compiler.targets.cuda.lofi_tiles import LofiWeight, lofi_tiles
from tilewright.compiler.targets.cuda.trials import BF16, NONE, OWN, Trials
from tilewright.compiler.targets.cuda.weights import Wanted, Weights, product_of
from tilewright.compiler.targets.program.instructions import Linear, Plan

_LEAST_CUT, _LEAST_UNCUT = 65, 129
_PIECES = 16
_MOST_ROWS = 65_536
_LIBRARY_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """A weight's values once more: bfloat16 ``[N, K]``, or with ``scales`` (float32 ``[N, 1]``, of
    rows) e4m3 codes, and perhaps the ``tiles`` of lofi.cu. Rows are as they are held.
    """

    values: Tensor
    scales: Tensor | None = None
    tiles: LofiWeight | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        tiles = 0 if self.tiles is None else self.tiles.num_bytes
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes) + tiles


def is_lofi(each: Linear, *, decodes: bool) -> bool:
    """Whether a product's fidelity is lofi in a phase."""
    if each.compute is None:
        return False
    return (each.compute.decode if decodes else each.compute.prefill) == "lofi"


def wants_codes(each: Linear, trials: Trials) -> bool:
    """Whether the trials ask for e4m3 codes of a weight, and the library takes its shape."""
    if trials.lofi == BF16 or product_of(each).kind != "bfp4":
        return False
    is_whole = all(size % _LIBRARY_MULTIPLE == 0 for size in each.weight.shape)
    return is_whole and (is_lofi(each, decodes=True) or is_lofi(each, decodes=False))


def wants_values(each: Linear, trials: Trials) -> bool:
    """Whether the trials ask for bfloat16 values of a product's weight."""
    is_head = each.weight.shape[0] > _MOST_ROWS
    return trials.copies == BF16 and product_of(each).kind in TILE_BYTES and not is_head


def copy_bytes(plan: Plan, trials: Trials) -> int:
    """Bytes that the copies of a plan's weights take, were every lofi weight exact."""
    found: dict[Wanted, int] = {}
    for each in _products(plan):
        rows, columns = each.weight.shape
        if wants_codes(each, trials):
            has_tiles = trials.lofi == OWN and rows >= TILE_ROWS * native.UNCUT_TILES
            tiles = rows * (columns * 9 // 16 + 4) if has_tiles else 0
            found[product_of(each)] = rows * (columns + 4) + tiles
        elif wants_values(each, trials):
            found[product_of(each)] = 2 * rows * columns
    return sum(found.values())


def _products(plan: Plan) -> Iterator[Linear]:
    return (each for each in plan.instructions if isinstance(each, Linear))


class Copies:
    """The copies that the trials ask for, made of the weights that are held.

    ``num_lofi``: lofi weights that were tried; ``num_inexact``: those of them that are not exact in
    e4m3, of which there is no copy, so that their products stay those of bfloat16.
    """

    def __init__(self, plan: Plan, weights: Weights, trials: Trials) -> None:
        self._trials = trials
        self._copies: dict[Wanted, Copy] = {}
        self.num_lofi = self.num_inexact = 0
        if trials.lofi == BF16 and trials.copies == NONE:
            return
        tried: set[Wanted] = set()
        for each in _products(plan):
            wanted = product_of(each)
            if wanted in tried:
                continue
            tried.add(wanted)
            if wants_codes(each, trials):
                copy = _codes(weights.held(wanted), trials)
                self.num_lofi += 1
                self.num_inexact += copy is None
                if copy is not None:
                    self._copies[wanted] = copy
            elif wants_values(each, trials):
                self._copies[wanted] = Copy(_dense(weights.held(wanted)))

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(each.num_bytes for each in self._copies.values())

    def said(self) -> str:
        """What is held twice, in words; empty where nothing is."""
        parts = []
        if self.num_lofi:
            exact = self.num_lofi - self.num_inexact
            parts.append(f"{exact} of {self.num_lofi} lofi weights exact in e4m3 and held as such")
        if tiles := sum(each.tiles is not None for each in self._copies.values()):
            parts.append(f"{tiles} of them in tiles of lofi.cu too")
        if values := sum(each.scales is None for each in self._copies.values()):
            parts.append(f"{values} weights held in bf16 too")
        return ", ".join(parts) + f" ({self.num_bytes / 1e9:.1f} GB)" if parts else ""

    def codes_for(self, each: Linear, num_rows: int, *, decodes: bool) -> Copy | None:
        """The codes that a product of so many rows takes; None where it takes none."""
        if num_rows < LEAST_LOFI or not is_lofi(each, decodes=decodes):
            return None
        copy = self._copies.get(product_of(each))
        return copy if copy is not None and copy.scales is not None else None

    def values_for(self, each: Linear, num_rows: int) -> Tensor | None:
        """The bfloat16 values that the library takes for so many rows; None where others are
        faster, as measured on an H200, or there are none.
        """
        copy = self._copies.get(product_of(each))
        if copy is None or copy.scales is not None:
            return None
        is_uncut = each.weight.shape[0] >= TILE_ROWS * native.UNCUT_TILES
        return copy.values if num_rows >= (_LEAST_UNCUT if is_uncut else _LEAST_CUT) else None


def _dense(held: HeldWeight) -> Tensor:
    shape = held.num_rows, held.num_columns
    if held.num_columns % 8:  # rows begin at multiples of 16 bytes
        shape = held.num_rows, held.num_columns + -held.num_columns % 8
    values = torch.empty(shape, dtype=torch.bfloat16, device=held.data.device)
    values = values[:, : held.num_columns]
    dequantise(values, held)
    return values


def _codes(held: HeldWeight, trials: Trials) -> Copy | None:
    """A piece of the rows at a time: the scratch is 12 bytes a value."""
    dense, found = _dense(held), []
    for part in dense.chunk(_PIECES):
        exact = exact_rows(part)
        if exact is None:
            return None
        found.append(exact)
    codes, scales = (torch.cat(parts) for parts in zip(*found, strict=True))
    device, tiles = held.data.device, None
    if trials.lofi == OWN and native_lofi.takes(held) and not native_lofi.why_not(device):
        tiles = lofi_tiles(held)
    return Copy(codes, scales, tiles)
