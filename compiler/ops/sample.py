"""The choice of each row's token as an operator; `tilewright.compiler.sampling` defines it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, operator
from tilewright.compiler.sampling.rng import draw


def likeliest(logits: Tensor) -> Tensor:
    """The first of the largest logits of every row: int64 ``[R]``.

    NumPy's own on the CPU: several times faster than torch's between two steps.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(-1)
    return torch.from_numpy(np.asarray(logits.numpy().argmax(-1)))


@operator(
    fake=lambda logits, *_: logits.new_empty((logits.shape[0],), dtype=torch.int64),
    cost=lambda logits, *_: Cost(5.0 * logits.numel(), logits.numel(), logits.shape[0]),
)
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Token ids ``[R]`` from ``logits [R, V]``: argmax, or inverse-CDF over ids in id order."""
    tokens = likeliest(logits)
    lines = logits.float().numpy()
    for row, heat in enumerate(temperature.tolist()):
        if heat > 0.0:
            tokens[row] = draw(
                lines[row],
                temperature=heat,
                top_k=int(top_k[row]),
                top_p=float(top_p[row]),
                seed=int(seeds[row]),
                position=int(positions[row]),
            )
    return tokens
