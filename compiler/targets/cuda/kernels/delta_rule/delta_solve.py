"""delta_solve.cu on the device: the systems of a prompt's chunks under the gated delta rule.

Knows nothing of the kernels that go on from them. Legend: T tokens, N chunks, C = 64 tokens of a
chunk, H value heads, G key heads, D size of a key and of a value.
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
"""Tokens of a chunk."""
_NUM_THREADS = 256
_SHARED = 4 * CHUNK * (2 * (HEAD_DIM + 4) + 2 * (CHUNK + 8) + 3)
"""Bytes of `Shared` of delta_solve.cu: two blocks a multiprocessor."""


class _DeltaSolve(ctypes.Structure):
    """`DeltaSolve` of delta_solve.cu."""

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
    """What the first kernel of :func:`.delta_rule_prompt.delta_rule_prompt` does, with products of
    TF32, where `.table.why_no_solve` has no objection.

    A chunk's corrections are ``corrections [N, H, D, C]`` (of its values) plus ``from_state [N, H,
    C, D]`` times the state before it. With them unit ``keys [N, G, D, C]``, the sums of decays up
    to each token in ``totals [N, H, C]``, and ``scales [N, G, 2, C]`` of queries and of keys; all
    float32 and contiguous, flat or longer than that. Tokens at negative ``positions [T]`` count as
    zeros, and nothing of them is read.
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
    """Results have room, and their rows of four floats are aligned."""
    for each in tensors:
        assert each.dtype == torch.float32 and each.is_contiguous()
        assert each.numel() >= num_elements and each.data_ptr() % 16 == 0


def _check_read(inputs: DeltaInputs, positions: Tensor) -> None:
    """What the kernel takes for granted of its operands."""
    floats = inputs.qkv, inputs.a, inputs.b, inputs.a_log, inputs.dt_bias
    assert all(each.dtype == torch.float32 for each in floats)
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert positions.shape == (len(inputs.a),) and len(inputs.qkv) == len(inputs.a)
    assert inputs.qkv.data_ptr() % 16 == 0 == inputs.qkv.stride(0) % 4
    assert inputs.a_log.is_contiguous() and inputs.dt_bias.is_contiguous()
    assert inputs.a_log.shape == inputs.dt_bias.shape == (inputs.num_heads,)
