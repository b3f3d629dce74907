"""What a sample is: filters, and one uniform number that depends on seed and position alone.

So a request's text does not depend on the batch it runs in, on its slot, or on the order of calls.
Kernels of targets must reproduce these choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.ops.library import Cost, operator

_MASK = 0xFFFFFFFF
_ROUNDS = 10


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from Philox4x32-10 (Salmon et al., 2011), key = seed, counter = position.

    Any integers are taken, modulo 2^64.
    """
    counter = [position & _MASK, (position >> 32) & _MASK, 0, 0]
    key = [seed & _MASK, (seed >> 32) & _MASK]
    for _ in range(_ROUNDS):
        first, second = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (second >> 32) ^ counter[1] ^ key[0],
            second & _MASK,
            (first >> 32) ^ counter[3] ^ key[1],
            first & _MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK, (key[1] + 0xBB67AE85) & _MASK]
    return counter[0] / 2.0**32


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of R rows, each a tensor ``[R]`` (end_tokens ``[R, E]``, padded with -1).

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 filter nothing; ``positions`` is where
    the sampled token will stand in its sequence. ``is_greedy``: no temperature is above 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor
    end_tokens: Tensor
    is_greedy: bool = False


def _filtered(logits_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """Logits with everything outside the top k, then outside the nucleus, at -inf.

    Equal logits are ranked by token id, lowest first.
    """
    if not 0 < top_k < logits_V.numel() and top_p >= 1.0:
        return logits_V
    ranked, order = torch.sort(logits_V, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if 0 < top_k < logits_V.numel():
        keep[top_k:] = False
    if top_p < 1.0:
        weights = ranked.masked_fill(~keep, float("-inf")).double().softmax(-1)
        keep &= weights.cumsum(-1) - weights < top_p
        keep[0] = True
    return logits_V.masked_fill(~torch.zeros_like(keep).scatter(0, order, keep), float("-inf"))


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
    for row, heat in enumerate(temperature.tolist()):
        if heat <= 0.0:
            continue
        wide = logits[row].float()
        scaled = (wide - wide.max()) / heat  # at most 0: no temperature is too low
        scaled = _filtered(scaled, int(top_k[row]), float(top_p[row]))
        cumulative = scaled.double().softmax(-1).cumsum(-1)
        target = uniform(int(seeds[row]), int(positions[row])) * float(cumulative[-1])
        chosen = torch.searchsorted(cumulative, torch.tensor(target).double(), right=True)
        tokens[row] = chosen.clamp(max=logits.shape[-1] - 1)
    return tokens
