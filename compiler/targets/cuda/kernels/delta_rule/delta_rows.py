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
    COLUMNS,
    HEAD_DIMS,
    check_rows,
    launch_of,
    pointers,
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
    tuple(f"delta_rows_{d}_{columns}" for d in HEAD_DIMS for columns in COLUMNS),
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
    accepted drafts. ``drafts`` gets the inputs of later tokens. ``early`` is as there.
    """
    check_rows(len(out), rows.counts, rows.accepted)
    num_drafts = drafts.x.shape[1]
    assert drafts.x.is_contiguous() and drafts.gates.is_contiguous() and num_drafts < MAX_ROWS
    assert drafts.x.dtype == drafts.gates.dtype == torch.float32
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
    arguments = _DeltaRows(
        **common,
        **pointers(draft_x=drafts.x, draft_gates=drafts.gates),
        **pointers(counts=rows.counts, accepted=rows.accepted),
        early=early,
        num_drafts=num_drafts,
    )
    nvrtc.launch(SOURCE, f"delta_rows_{suffix}", at=at, arguments=arguments)
