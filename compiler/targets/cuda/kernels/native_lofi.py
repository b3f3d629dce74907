"""lofi.cu on the device: products of up to 512 tokens with bfp4 weights, on e4m3 operands.

Not yet run on a GPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.held import TILE_BYTES, HeldWeight
from tilewright.compiler.targets.cuda.kernels import nvrtc
from tilewright.compiler.targets.cuda.kernels.native import (
    MOST_SHARED,
    num_slices,
    product_arguments,
)
from tilewright.compiler.targets.cuda.kernels.native_wide import MAX_TOKENS, Wide
from tilewright.compiler.targets.cuda.lofi_tiles import LofiWeight

_MOST_DEPTH = 12


@dataclass(frozen=True, slots=True)
class Way:
    """How a product lies on the device: ``eights`` of tokens and ``groups`` of four warps, with 64
    rows each, a block; ``resident`` blocks a multiprocessor.
    """

    eights: int
    groups: int
    resident: int = 1

    @property
    def kernel(self) -> str:
        """The name of the kernel that goes so over a weight."""
        return f"lofi_{self.eights}_{self.groups}"

    @property
    def step_bytes(self) -> int:
        """Shared memory of 128 columns of a block's tokens and rows."""
        return self.eights * 1024 + 4 * self.groups * TILE_BYTES["bfp4"]

    @property
    def depth(self) -> int:
        """Steps of 128 columns in flight."""
        room = (MOST_SHARED + 2048) // self.resident - 3072
        return min(_MOST_DEPTH, room // self.step_bytes)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: steps begin at a multiple of 1,024."""
        return self.depth * self.step_bytes + 1024


WAYS = Way(4, 2, 2), Way(8, 2, 2), Way(8, 4)
"""Those that there are kernels for."""


def choose_way(num_tokens: int) -> Way:
    """How a product of so many tokens goes: as predicted, until it is measured."""
    return WAYS[0] if num_tokens <= 32 else WAYS[1] if num_tokens <= 64 else WAYS[2]


class _ArrangeLofi(ctypes.Structure):
    """`ArrangeLofi` of lofi.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out", "scales")),
        *((name, ctypes.c_int) for name in ("num_places", "num_columns", "x_stride", "padded")),
    )


class _Lofi(ctypes.Structure):
    """`Lofi` of lofi.cu."""

    _fields_ = (
        ("wide", Wide),
        *((name, ctypes.c_void_p) for name in ("row_scales", "token_scales")),
    )


SOURCE = nvrtc.Source(
    Path(__file__).with_name("lofi.cu"),
    ("arrange_lofi", *(way.kernel for way in WAYS)),
    headers=("primitives.cuh", "tiles.cuh", "wide.cuh"),
    structures=(("ArrangeLofi", _ArrangeLofi), ("Lofi", _Lofi)),
)


def why_not(device: torch.device) -> str:
    """Why lofi.cu cannot run on a device; empty where it can."""
    return nvrtc.why_not(device, SOURCE)


def takes(held: HeldWeight) -> bool:
    """Whether a weight is one of these: in bfp4, and large enough that its K is not cut."""
    is_bfp4 = held.kind == "bfp4" and held.num_experts == 1 and held.num_columns % 4 == 0
    return is_bfp4 and num_slices(held) == 1


def linear(
    out: Tensor,
    x: Tensor,
    weight: LofiWeight,
    *,
    epilogue: int,
    bias: Tensor | None = None,
    way: Way | None = None,
) -> None:
    """What :func:`.native_wide.linear` does, of ``x [M, K]`` bfloat16, M up to 512, rounded to e4m3
    as :func:`..e4m3.round_rows` does; sums go on in float32 every 128 columns.
    """
    held, num_tokens = weight.held, len(x)
    assert num_tokens <= MAX_TOKENS and x.stride(1) == 1 and x.dtype == torch.bfloat16
    assert x.stride(0) % 4 == 0 == x.data_ptr() % 8 and held.num_columns % 4 == 0
    way = way or choose_way(num_tokens)
    places = -(-num_tokens // (8 * way.eights)) * 8 * way.eights
    padded = held.num_column_tiles * 128
    arranged = torch.empty(places * padded, dtype=torch.uint8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    arguments = _ArrangeLofi(
        x=x.data_ptr(),
        out=arranged.data_ptr(),
        scales=scales.data_ptr(),
        num_places=places,
        num_columns=held.num_columns,
        x_stride=x.stride(0),
        padded=padded,
    )
    at = nvrtc.Launch((num_tokens, 1, 1), 256)
    nvrtc.launch(SOURCE, "arrange_lofi", at=at, arguments=arguments)
    product = product_arguments(out, held, epilogue=epilogue, num_tokens=num_tokens, bias=bias)
    product.weight, product.scale = weight.data.data_ptr(), 1.0
    product.x, product.x_stride = arranged.data_ptr(), places
    assert way.shared_bytes <= MOST_SHARED and way.depth > 1
    row_blocks = -(-held.num_row_tiles // (4 * way.groups))
    at = nvrtc.Launch(
        (places // (8 * way.eights), row_blocks, 1), 128 * way.groups, way.shared_bytes
    )
    whole = _Lofi(
        wide=Wide(product=product, depth=way.depth, places=0),
        row_scales=weight.scales.data_ptr(),
        token_scales=scales.data_ptr(),
    )
    nvrtc.launch(SOURCE, way.kernel, at=at, arguments=whole)
