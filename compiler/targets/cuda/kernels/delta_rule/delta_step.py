"""Launcher for ``delta_step.cu``: linear attention for one token, from convolution to gated norm.

Divides a row's state into blocks. Excludes operand sources. Shape letters: B rows, H value heads, G
key heads, D key and value size, C = 2 G D + H D channels, W convolution width, S slots.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs
from tilewright.compiler.targets.cuda.tuning import tuning

HEAD_DIMS = (64, 128)
WIDTHS = (2, 3, 4)
MOST_BLOCKS = 8
"""Maximum blocks in a cluster, which has the value heads of a key head."""

COLUMNS = (32, 64)
"""Columns of a head's state for a block. The fastest comes first."""


_STREAMED_ROWS: int = tuning()["delta_rule"]["streamed_rows"]
"""Maximum rows for a cache bypass, with 32 heads and 128 channels on an
H200.
"""


class _DeltaStep(ctypes.Structure):
    """Mirror for `DeltaStep` in delta_step.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "window", "a", "b", "a_log")),
        *((name, ctypes.c_void_p) for name in ("dt_bias", "z", "norm", "state", "out")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots")),
        *((name, ctypes.c_int) for name in ("x_stride", "a_stride", "b_stride", "z_stride")),
        *((name, ctypes.c_int) for name in ("out_stride", "num_heads", "num_key_heads")),
        *((name, ctypes.c_int) for name in ("width", "early", "num_blocks", "share", "streams")),
        ("eps", ctypes.c_float),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("delta_step.cu"),
    tuple(f"delta_step_{d}_{columns}" for d in HEAD_DIMS for columns in COLUMNS),
    headers=("primitives.cuh", "attention_primitives.cuh", "delta_gates.cuh", "delta_step.cuh"),
    structures=(("DeltaStep", _DeltaStep),),
)


def columns_of_a_block(num_heads: int, num_key_heads: int, head_dim: int) -> int:
    """Return the state columns per block. 0: the heads do not fit a cluster."""
    each = num_heads // num_key_heads * head_dim
    return next((columns for columns in COLUMNS if each // columns <= MOST_BLOCKS), 0)


def delta_step(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    weight: Tensor,
    window: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
    early: bool = False,
    streams: bool | None = None,
) -> None:
    """Run the convolution, the delta rule and the gated norm for a token per row.

    Args:
        out: bfloat16, with rows aligned to 8 bytes.
        inputs: ``inputs.qkv [B, C]`` is the convolution's input.
        weight: ``[C, W]``.
        window: ``[S, C, W - 1]``.
        early: Whether positions, slots, window and state are complete before the running
            kernels start.
        streams: Whether the state bypasses the cache. None: if this is faster. Bits are equal.
    """
    common, at, suffix = launch_of(
        out,
        inputs,
        z,
        norm,
        weight=weight,
        window=window,
        state=state,
        positions=positions,
        slots=slots,
    )
    streams = len(out) <= _STREAMED_ROWS if streams is None else streams
    arguments = _DeltaStep(**common, early=early, streams=streams)
    nvrtc.launch(SOURCE, f"delta_step_{suffix}", at=at, arguments=arguments)


def launch_of(
    out: Tensor,
    inputs: DeltaInputs,
    z: Tensor,
    norm: tuple[Tensor, float],
    *,
    weight: Tensor,
    window: Tensor,
    state: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> tuple[dict[str, Any], nvrtc.Launch, str]:
    """Check operands. Return the fields of both kernels, their launch and the end of their names.

    Both take a token per row, or consecutive tokens in a slot.
    """
    _check_operands(out, inputs, z, norm[0])
    _check_state(inputs, weight, window, state)
    check_rows(len(out), positions, slots)
    heads, key_heads, dim = inputs.num_heads, inputs.num_key_heads, inputs.key_dim
    columns = columns_of_a_block(heads, key_heads, dim)
    num_blocks = heads // key_heads * dim // columns
    common = {
        **pointers(x=inputs.qkv, weight=weight, window=window, a=inputs.a, b=inputs.b),
        **pointers(a_log=inputs.a_log, dt_bias=inputs.dt_bias, z=z, norm=norm[0], state=state),
        **pointers(out=out, positions=positions, slots=slots),
        **_strides(x=inputs.qkv, a=inputs.a, b=inputs.b, z=z, out=out),
        **{"num_heads": heads, "num_key_heads": key_heads, "width": weight.shape[1]},
        **{"num_blocks": num_blocks, "share": -(-2 * dim // (4 * num_blocks)) * 4, "eps": norm[1]},
    }
    blocks = key_heads * num_blocks, len(out), 1
    at = nvrtc.Launch(blocks, 4 * columns, cluster=(num_blocks, 1, 1))
    return common, at, f"{dim}_{columns}"


def pointers(**tensors: Tensor) -> dict[str, int]:
    """Return addresses by field name."""
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()}


def _check_operands(out: Tensor, inputs: DeltaInputs, z: Tensor, norm: Tensor) -> None:
    """Check the kernel's assumptions about inputs and outputs."""
    floats = inputs.qkv, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias, z, norm
    assert all(each.dtype == torch.float32 for each in floats) and out.dtype == torch.bfloat16
    assert out.shape == z.shape == (len(inputs.qkv), inputs.num_heads * inputs.key_dim)
    assert z.stride(1) == out.stride(1) == 1 and norm.shape == (inputs.key_dim,)
    assert norm.is_contiguous() and inputs.a_log.is_contiguous() and inputs.dt_bias.is_contiguous()
    assert inputs.a_log.shape == inputs.dt_bias.shape == (inputs.num_heads,)
    assert out.stride(0) % 4 == 0 and out.data_ptr() % 8 == 0


def check_rows(num_rows: int, *of_rows: Tensor) -> None:
    """Check integers by row."""
    assert all(each.dtype == torch.int64 and each.shape == (num_rows,) for each in of_rows)
    assert all(each.is_contiguous() for each in of_rows)


def _check_state(inputs: DeltaInputs, weight: Tensor, window: Tensor, state: Tensor) -> None:
    """Check the kernel's assumptions about window and state."""
    inputs.check(state)
    num_channels, width = weight.shape
    assert inputs.qkv.shape[1] == num_channels and inputs.key_dim == inputs.value_dim
    assert window.shape[1:] == (num_channels, width - 1) and width in WIDTHS
    assert weight.is_contiguous() and window.is_contiguous() and state.data_ptr() % 16 == 0
    assert weight.dtype == window.dtype == state.dtype == torch.float32
