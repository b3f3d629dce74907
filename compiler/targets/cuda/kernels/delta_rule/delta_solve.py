"""Launcher for ``delta_solve.cu``: the linear systems of prompt chunks in the gated delta rule.

Excludes later kernels. Shape letters: T tokens, N chunks, C = 64 tokens in a chunk, H value heads,
G key heads, D key and value size.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs

HEAD_DIM = 128
CHUNK = 64
"""Tokens in a chunk."""
_NUM_THREADS = 256
_SHARED = 4 * CHUNK * (2 * (HEAD_DIM + 4) + 2 * (CHUNK + 8) + 3)
"""Size of `Shared` in delta_solve.cu, in bytes. Two blocks fit a multiprocessor."""


class _DeltaSolve(ctypes.Structure):
    """Mirror for `DeltaSolve` in delta_solve.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("from_state", "corrections", "keys", "totals")),
        *((name, ctypes.c_void_p) for name in ("scales", "qkv", "a", "b", "a_log", "dt_bias")),
        ("positions", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_heads", "num_key_heads")),
        *((name, ctypes.c_int) for name in ("qkv_stride", "a_stride", "b_stride")),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("delta_solve.cu"),
    ("delta_solve",),
    headers=("primitives.cuh", "attention_primitives.cuh", "delta_gates.cuh"),
    structures=(("DeltaSolve", _DeltaSolve),),
)


def delta_solve(
    from_state: Tensor,
    corrections: Tensor,
    keys: Tensor,
    totals: Tensor,
    scales: Tensor,
    *,
    inputs: DeltaInputs,
    positions: Tensor,
) -> None:
    """Solve the systems of all chunks, with TF32 products.

    A chunk's corrections are ``corrections`` plus ``from_state`` times the state before the
    chunk. Outputs are float32, contiguous, and may be flat or longer. `.table.why_no_solve` names
    unsupported inputs.

    Args:
        from_state: ``[N, H, C, D]``.
        corrections: Part from the values, ``[N, H, D, C]``.
        keys: Unit keys ``[N, G, D, C]``.
        totals: Cumulative log decays ``[N, H, C]``.
        scales: Scales of queries and keys, ``[N, G, 2, C]``.
        positions: int64 ``[T]``. Tokens at negative positions count as zeros and are not read.
    """
    num_tokens, heads = inputs.a.shape
    num_chunks, key_heads = -(-num_tokens // CHUNK), inputs.num_key_heads
    per_head, per_key_head = num_chunks * heads * CHUNK, num_chunks * key_heads * CHUNK
    _check_written((from_state, corrections), per_head * HEAD_DIM)
    _check_written((keys,), per_key_head * HEAD_DIM)
    _check_written((totals,), per_head)
    _check_written((scales,), per_key_head * 2)
    _check_read(inputs, positions)
    arguments = _DeltaSolve(
        from_state=from_state.data_ptr(),
        corrections=corrections.data_ptr(),
        keys=keys.data_ptr(),
        totals=totals.data_ptr(),
        scales=scales.data_ptr(),
        qkv=inputs.qkv.data_ptr(),
        a=inputs.a.data_ptr(),
        b=inputs.b.data_ptr(),
        a_log=inputs.a_log.data_ptr(),
        dt_bias=inputs.dt_bias.data_ptr(),
        positions=positions.data_ptr(),
        num_tokens=num_tokens,
        num_heads=heads,
        num_key_heads=key_heads,
        qkv_stride=inputs.qkv.stride(0),
        a_stride=inputs.a.stride(0),
        b_stride=inputs.b.stride(0),
    )
    at = nvrtc.Launch(blocks=(num_chunks, heads, 1), num_threads=_NUM_THREADS, shared=_SHARED)
    nvrtc.launch(SOURCE, "delta_solve", at=at, arguments=arguments)


def _check_written(tensors: tuple[Tensor, ...], num_elements: int) -> None:
    """Check the size and alignment of outputs."""
    for each in tensors:
        assert each.dtype == torch.float32 and each.is_contiguous()
        assert each.numel() >= num_elements and each.data_ptr() % 16 == 0


def _check_read(inputs: DeltaInputs, positions: Tensor) -> None:
    """Check the kernel's assumptions about its inputs."""
    floats = inputs.qkv, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias
    assert all(each.dtype == torch.float32 for each in floats)
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert positions.shape == (len(inputs.a),) and len(inputs.qkv) == len(inputs.a)
    assert inputs.qkv.data_ptr() % 16 == 0 == inputs.qkv.stride(0) % 4
    assert inputs.a_log.is_contiguous() and inputs.dt_bias.is_contiguous()
    assert inputs.a_log.shape == inputs.dt_bias.shape == (inputs.num_heads,)
