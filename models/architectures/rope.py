"""Frequencies of rotary position embeddings."""

from __future__ import annotations

import math

import torch

from tilewright.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)


def inverse_frequencies(
    rope: RopeConfig, head_dim: int, max_context: int | None = None
) -> list[float]:
    """Return the angle per position of every pair, as float32 values.

    The float32 operations and their order are those of transformers, so that all bits agree.
    ``freq_factors`` divide the results. ``max_context`` is the longest sequence, which selects
    LongRoPE's factors (None: longer than the original context). An executable rotates a position
    by a constant angle, so a growing sequence does not change its rotation.
    """
    dim = 2 * rope.num_pairs(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim
    powers = rope.theta**exponents
    scaling = rope.scaling
    if isinstance(scaling, LongRopeScaling):
        is_short = max_context is not None and max_context <= scaling.original_max_positions
        factors = scaling.short_factors if is_short else scaling.long_factors
        powers = torch.tensor(factors, dtype=torch.float32) * powers
    freqs = 1.0 / powers
    if rope.freq_factors is not None:
        freqs = freqs / torch.tensor(rope.freq_factors, dtype=torch.float32)
    if isinstance(scaling, ProportionalScaling):
        freqs[scaling.num_turned :] = 0
    if isinstance(scaling, LinearScaling | ProportionalScaling):
        freqs = freqs / scaling.factor
    if isinstance(scaling, YarnScaling):
        kept = 1 - _yarn_ramp(scaling, rope.theta, dim)
        freqs = 1.0 / (scaling.factor * powers) * (1 - kept) + freqs * kept
    if isinstance(scaling, Llama3Scaling):
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        length = scaling.original_max_positions
        wavelengths = 2 * math.pi / freqs
        scaled = torch.where(wavelengths > length / low, freqs / scaling.factor, freqs)
        smooth = (length / wavelengths - low) / (high - low)
        blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
        between = ~(wavelengths < length / high) & ~(wavelengths > length / low)
        freqs = torch.where(between, blended, scaled)
    values: list[float] = freqs.tolist()
    return values


def _yarn_ramp(scaling: YarnScaling, theta: float, dim: int) -> torch.Tensor:
    """Return the share of the divided frequency, by pair, from 0 to 1."""

    def border(turns: float) -> float:
        length = scaling.original_max_positions
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = border(scaling.beta_fast), border(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    return torch.clamp((pairs - low) / (high - low), 0, 1)
