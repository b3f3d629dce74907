"""wide.cu on the device: products of 33 to 512 tokens with weights in blocks.

Knows nothing of where its operands come from.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.held import TILE_BYTES, HeldWeight
from tilewright.compiler.targets.cuda.kernels import nvrtc
from tilewright.compiler.targets.cuda.kernels.native import (
    MOST_SHARED,
    Product,
    num_slices,
    product_arguments,
)

MAX_TOKENS = 512
"""With more, the library's products of dequantised weights are as fast."""
MORE_THAN = 32
"""With so many tokens or fewer, linear.cu's products are faster."""

_CHUNK = 64
_TILES = 16
_DEPTHS = {("bfp8", 8): 4, ("bfp8", 16): 3, ("bfp4", 8): 6, ("bfp4", 16): 4}
"""Steps of 128 columns in flight, by format and eights of tokens."""


class _Arrange(ctypes.Structure):
    """`Arrange` of wide.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_places", "num_columns", "x_stride")),
    )


SOURCE = nvrtc.Source(
    Path(__file__).with_name("wide.cu"),
    ("arrange", *(f"wide_{kind}_{groups}_{deep}" for (kind, groups), deep in _DEPTHS.items())),
    headers=("primitives.cuh", "tiles.cuh", "wide.cuh"),
    structures=(("Arrange", _Arrange), ("Product", Product)),
)


def why_not(device: torch.device) -> str:
    """Why wide.cu cannot run on a device; empty where it can."""
    return nvrtc.why_not(device, SOURCE)


def takes(held: HeldWeight, num_tokens: int) -> bool:
    """Whether a product with a weight is one of these."""
    is_held_so = held.kind in TILE_BYTES and held.num_experts == 1 and held.num_columns % 4 == 0
    return is_held_so and MORE_THAN < num_tokens <= MAX_TOKENS


def scratch(num_columns: int, device: torch.device) -> Tensor:
    """What :func:`linear` needs beside its operands, for weights of up to so many columns."""
    num_steps = -(-num_columns // 128)
    return torch.empty(MAX_TOKENS * num_steps * 256, dtype=torch.uint8, device=device)


def shared_bytes(kind: str, groups: int) -> int:
    """Dynamic shared memory of a block for ``groups`` eights of tokens: the ring, or the sums."""
    ring = _DEPTHS[kind, groups] * (groups * 8 * 256 + _TILES * TILE_BYTES[kind]) + 1024
    return max(ring, groups * 8 * (_TILES * 16 + 8) * 4)


def linear(
    out: Tensor,
    x: Tensor,
    held: HeldWeight,
    *,
    epilogue: int,
    arranged: Tensor,
    bias: Tensor | None = None,
) -> None:
    """What :func:`.native.linear` does, of ``x [M, K]`` bfloat16 with M as :func:`takes` has it and
    with the same bits; ``arranged``: a :func:`scratch`, overwritten.
    """
    num_tokens = len(x)
    assert takes(held, num_tokens) and x.dtype == torch.bfloat16 and x.stride(1) == 1
    assert x.stride(0) % 2 == 0 == x.data_ptr() % 4 and held.data.data_ptr() % 16 == 0
    groups = 8 if num_tokens <= 64 else 16
    num_blocks = -(-num_tokens // (8 * groups))
    places, steps = num_blocks * 8 * groups, held.num_column_tiles
    assert arranged.data_ptr() % 16 == 0 and arranged.numel() >= places * steps * 256
    arguments = _Arrange(
        x=x.data_ptr(),
        out=arranged.data_ptr(),
        num_tokens=num_tokens,
        num_places=places,
        num_columns=held.num_columns,
        x_stride=x.stride(0),
    )
    at = nvrtc.Launch((places // 32, steps * 128 // _CHUNK, 1), 256)
    nvrtc.launch(SOURCE, "arrange", at=at, arguments=arguments)
    product = product_arguments(out, held, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.x, product.x_stride = arranged.data_ptr(), places
    _launch(product, held, num_blocks, groups)


def _launch(product: Product, held: HeldWeight, num_blocks: int, groups: int) -> None:
    """Blocks of all tokens beside each other: they read the same rows of the weight."""
    slices, shared = num_slices(held), shared_bytes(held.kind, groups)
    assert shared <= MOST_SHARED
    at = nvrtc.Launch(
        (num_blocks, slices, -(-held.num_row_tiles // _TILES)),
        32 * _TILES,
        shared,
        cluster=(1, slices, 1),
    )
    name = f"wide_{held.kind}_{groups}_{_DEPTHS[held.kind, groups]}"
    nvrtc.launch(SOURCE, name, at=at, arguments=product)
