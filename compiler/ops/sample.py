"""Token sampling as an operator. `tilewright.compiler.sampling` defines the result."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, operator
from tilewright.compiler.sampling.rng import draw


def likeliest(logits: Tensor) -> Tensor:
    """Return the first index of the largest logit per row, int64 ``[R]``.

    On a CPU, NumPy is several times faster than torch between two steps.
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
