"""Reverses the changes by llama.cpp's converter to linear attention tensors.

The converter orders value heads by index within their key head. In Hugging Face files, a key head's
value heads are adjacent. The converter also stores -exp(A_log), and drops the convolution's axis of
size 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import shown

if TYPE_CHECKING:
    from tilewright.models.config import DeltaShape

Order = npt.NDArray[np.int64]

DECAY = "linear_attn.A_log"
_CONVOLUTION = "linear_attn.conv1d.weight"
_ONE_ROW = "mlp.shared_expert_gate.weight"
_BY_VALUE_HEAD = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")


def hf_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a tensor's shape with the size-1 axes dropped by GGUF."""
    if name.endswith(_CONVOLUTION) and len(shape) == 2:
        return shape[0], 1, shape[1]
    if name.endswith(_ONE_ROW) and len(shape) == 1:
        return 1, *shape
    return shape


def tiled_rows(name: str, delta: DeltaShape) -> Order | None:
    """Return the file row for each Hugging Face row, for tiled value heads. None: equal order."""
    stem, _, part = name.rpartition("linear_attn.")
    if not stem:
        return None
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        rest = 2 * delta.key_width
        return np.concatenate((np.arange(rest), rest + _grouped(delta, delta.value_dim)))
    if part == "in_proj_z.weight":
        return _grouped(delta, delta.value_dim)
    return _grouped(delta, 1) if part in _BY_VALUE_HEAD else None


def tiled_columns(name: str, delta: DeltaShape) -> Order | None:
    """Return the file column for each Hugging Face column, for tiled value heads. None: equal
    order.
    """
    is_product = name.endswith("linear_attn.out_proj.weight")
    return _grouped(delta, delta.value_dim) if is_product else None


def _grouped(delta: DeltaShape, width: int) -> Order:
    """Return tiled rows in grouped order: all value heads for each key head."""
    ratio = delta.num_value_heads // delta.num_key_heads
    rows = np.arange(delta.num_value_heads * width, dtype=np.int64)
    tiled = rows.reshape(ratio, delta.num_key_heads, width)
    return np.ascontiguousarray(tiled.swapaxes(0, 1)).reshape(-1)


def log_decay(values: Tensor, name: str, path: Path) -> Tensor:
    """Return Hugging Face's ``A_log`` for GGUF's -exp(A_log).

    Raises:
        CheckpointError: A value is not negative.
    """
    if not bool((values < 0).all()):
        raise CheckpointError(
            f"{path}: tensor {shown(name)} has a value of 0 or above; allowed: below 0 in ssm_a"
        )
    return torch.log(-values.float())
