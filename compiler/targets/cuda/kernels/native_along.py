"""along.cu on the device: a product of one token with a weight in blocks, and in the same launch a
small one in bfloat16 of the same norm.

Knows nothing of where its operands come from.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.kernels import native, nvrtc
from tilewright.compiler.targets.cuda.kernels.launch import num_processors

MOST_TILES = 8
"""Row tiles of the small product: one block each, which the other has less."""

_FIXED = 4096  # bytes of a block that kernels fix, slices' sums of either and the norm's
_DEPTH = 2  # of the small product: no more memory than the other takes with bfp8
_NUM_THREADS = 256


class _Both(ctypes.Structure):
    """`Both` of along.cu."""

    _fields_ = (
        ("main", native.Product),
        ("along", native.Product),
        ("num_main", ctypes.c_uint),
    )


_PATH = Path(__file__).with_name("along.cu")

SOURCE = nvrtc.Source(
    _PATH,
    tuple(
        f"gemv_along_{kind}_{depth}"
        for kind, depth in re.findall(
            rf"^BOTH\((\w+), \w+, (\d+), {_DEPTH}\)", _PATH.read_text(), re.M
        )
    ),
    headers=("primitives.cuh", "tiles.cuh", "norm.cuh", "gemv.cuh"),
    structures=(("Product", native.Product), ("Both", _Both)),
)


@dataclass(frozen=True, slots=True)
class Small:
    """The weight of the small product, and where its result goes, ``[1, N]`` float32."""

    held: HeldWeight
    out: Tensor


def why_not(device: torch.device) -> str:
    """Why along.cu cannot run on a device; empty where it can."""
    return nvrtc.why_not(device, SOURCE)


def takes(held: HeldWeight, small: HeldWeight) -> bool:
    """Whether a product with a weight takes along one with another."""
    if small.kind != "bf16" or small.num_row_tiles > MOST_TILES:
        return False
    if held.num_columns != small.num_columns or not native.takes_norm(held.num_columns):
        return False
    walk = native.choose_walk(held)
    if walk is None or _kernel(held, walk) not in SOURCE.names:
        return False
    each = _shared_bytes(held, walk) + _FIXED + 1024
    return walk.blocks_each * each <= nvrtc.MOST_SHARED + 1024


def _kernel(held: HeldWeight, walk: native.Walk) -> str:
    return f"gemv_along_{held.kind}_{walk.depth}"


def _shared_bytes(held: HeldWeight, walk: native.Walk) -> int:
    """Dynamic shared memory of a block, be it the one's or the other's."""
    small = native.Walk(_DEPTH, walk.blocks_each)
    steps = held.num_column_tiles
    return max(walk.shared_bytes(held.kind, steps), small.shared_bytes("bf16", steps))


def linear(
    out: Tensor,
    x: Tensor,
    held: HeldWeight,
    small: Small,
    *,
    epilogue: int,
    norm: tuple[Tensor, float],
    bias: Tensor | None = None,
) -> None:
    """What :func:`.native.linear` does, of ``x [1, K]`` float32 and one token, and ``small``: the
    product of the same norm with its weight, stored. See :func:`takes`; bits are as there.
    """
    walk = native.choose_walk(held)
    assert walk is not None and takes(held, small.held)
    assert x.data_ptr() % 16 == 0 == held.data.data_ptr() % 16 == small.held.data.data_ptr() % 16
    both = _Both(
        main=native.product_arguments(out, held, epilogue=epilogue, num_tokens=1, bias=bias),
        along=native.product_arguments(
            small.out, small.held, epilogue=native.STORE, num_tokens=1, bias=None
        ),
    )
    for each in (both.main, both.along):
        each.x, each.x_stride = x.data_ptr(), x.stride(0)
        each.norm, each.eps = norm[0].data_ptr(), norm[1]
    num_along = small.held.num_row_tiles
    num_blocks = walk.blocks_each * num_processors(held.data.device) - num_along
    both.num_main = min(held.num_row_tiles, num_blocks)
    at = nvrtc.Launch((both.num_main + num_along, 1, 1), _NUM_THREADS, _shared_bytes(held, walk))
    nvrtc.launch(SOURCE, _kernel(held, walk), at=at, arguments=both)
