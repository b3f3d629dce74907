"""Launcher for ``delta_rows.cu``: linear attention for consecutive tokens of each slot.

Shape letters as in :mod:`.delta_step`. Excludes acceptance of drafts.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_step import (
    _COLUMNS,
    HEAD_DIMS,
    _check_operands,
    _check_rows,
    _check_state,
    _places,
    _strides,
    columns_of_a_block,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.rows_triton import DraftInputs
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import DeltaInputs
from tilewright.compiler.targets.cuda.state.token_batch import MAX_ROWS, SlotRows


class _DeltaRows(ctypes.Structure):
    """Mirror for `DeltaRows` in delta_rows.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "window", "a", "b", "a_log")),
        *((name, ctypes.c_void_p) for name in ("dt_bias", "z", "norm", "state", "out")),
        *((name, ctypes.c_void_p) for name in ("draft_x", "draft_gates")),
        *((name, ctypes.c_void_p) for name in ("positions", "slots", "counts", "accepted")),
        *((name, ctypes.c_int) for name in ("x_stride", "a_stride", "b_stride", "z_stride")),
        *((name, ctypes.c_int) for name in ("out_stride", "num_heads", "num_key_heads")),
        *((name, ctypes.c_int) for name in ("width", "early", "num_blocks", "share")),
        ("num_drafts", ctypes.c_int),
        ("eps", ctypes.c_float),
    )


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("delta_rows.cu"),
    tuple(f"delta_rows_{d}_{columns}" for d in HEAD_DIMS for columns in _COLUMNS),
    headers=("primitives.cuh", "attention_primitives.cuh", "delta_gates.cuh", "delta_step.cuh"),
    structures=(("DeltaRows", _DeltaRows),),
)


def delta_rows(
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
    rows: SlotRows,
    drafts: DraftInputs,
    early: bool = False,
) -> None:
    """Run :func:`.delta_step.delta_step` for consecutive rows of a slot, after its accepted drafts.

    A slot gets window and state after its first token. A slot without tokens gets them after its
    accepted drafts. ``drafts`` keeps the inputs of later tokens. ``early`` as there.
    """
    _check_operands(out, inputs, z, norm[0])
    _check_state(inputs, weight, window, state)
    _check_rows(len(out), positions, slots, rows.counts, rows.accepted)
    num_drafts = drafts.x.shape[1]
    assert drafts.x.is_contiguous() and drafts.gates.is_contiguous() and num_drafts < MAX_ROWS
    assert drafts.x.dtype == drafts.gates.dtype == torch.float32
    heads, key_heads, dim = inputs.num_heads, inputs.num_key_heads, inputs.key_dim
    columns = columns_of_a_block(heads, key_heads, dim)
    num_blocks = heads // key_heads * dim // columns
    arguments = _DeltaRows(
        **_places(x=inputs.qkv, weight=weight, window=window, a=inputs.a, b=inputs.b),
        **_places(a_log=inputs.a_log, dt_bias=inputs.dt_bias, z=z, norm=norm[0], state=state),
        **_places(out=out, draft_x=drafts.x, draft_gates=drafts.gates),
        **_places(positions=positions, slots=slots, counts=rows.counts, accepted=rows.accepted),
        **_strides(x=inputs.qkv, a=inputs.a, b=inputs.b, z=z, out=out),
        num_heads=heads,
        num_key_heads=key_heads,
        width=weight.shape[1],
        early=early,
        num_blocks=num_blocks,
        share=-(-2 * dim // (4 * num_blocks)) * 4,
        num_drafts=num_drafts,
        eps=norm[1],
    )
    at = nvrtc.Launch(
        (key_heads * num_blocks, len(out), 1), 4 * columns, cluster=(num_blocks, 1, 1)
    )
    nvrtc.launch(SOURCE, f"delta_rows_{dim}_{columns}", at=at, arguments=arguments)
