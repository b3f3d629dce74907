"""Tables of cosines and sines against transformers': every kind of scaling, partial, and both
orders of pairs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_phi3 import longrope
from tests.tiny import tiny_config
from tests.twins import twin_of
from tilewright.compiler import ops
from tilewright.errors import CheckpointError
from tilewright.models.architectures.layers import RotaryEmbedding, rotate_half_split
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import (
    LinearScaling,
    Llama3Scaling,
    ProportionalScaling,
    RopeConfig,
    YarnScaling,
)

POSITIONS = torch.tensor([0, 1, 2, 7, 63, 100, 255])
ROPES: dict[str, tuple[str, RopeConfig]] = {
    "default": ("llama", RopeConfig(theta=500000.0)),
    "llama3": ("llama", RopeConfig(theta=500000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 64))),
    "linear": ("llama", RopeConfig(theta=10000.0, scaling=LinearScaling(8.0))),
    "longrope": ("phi3", longrope(16, original=64)),
    "yarn": ("llama", RopeConfig(theta=10000.0, scaling=YarnScaling(4.0, 64, 1.1386))),
    "yarn_borders": (
        "llama",
        RopeConfig(theta=500000.0, scaling=YarnScaling(16.0, 128, 1.0, 8.0, 2.0, truncate=False)),
    ),
    "proportional": ("llama", RopeConfig(theta=1e6, scaling=ProportionalScaling(4, 2.0))),
    "partial": ("phi3", RopeConfig(theta=10000.0, num_rotated=24)),
    "partial_longrope": ("phi3", longrope(12, original=64, num_rotated=24)),
}


def tables(rope: RopeConfig, max_context: int) -> tuple[Tensor, Tensor]:
    """Ours ``[T, R]``."""
    module = RotaryEmbedding(rope.num_pairs(32), rope.attention_factor)
    module.inv_freq = torch.tensor(inverse_frequencies(rope, 32, max_context))
    cos, sin = module(POSITIONS[max_context > POSITIONS])
    return cos.squeeze(1), sin.squeeze(1)


@pytest.mark.parametrize("max_context", [64, 256])
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_transformers(name: str, max_context: int) -> None:
    """Of positions up to a context, all at once: 64 is LongRoPE's original one here."""
    model_type, rope = ROPES[name]
    config = tiny_config(model_type=model_type, hidden_size=128, head_dim=32, rope=rope)
    positions = POSITIONS[max_context > POSITIONS]
    with torch.no_grad():
        rotary: Any = twin_of(config).model.rotary_emb
        expected = rotary(torch.zeros(1), positions[None])
    for ours, theirs in zip(tables(rope, max_context), expected, strict=True):
        halves = theirs[0].chunk(2, dim=-1)
        assert torch.equal(*halves) and ours.shape == halves[0].shape
        torch.testing.assert_close(ours, halves[0], atol=1e-6, rtol=0)


def test_the_kinds_differ() -> None:
    """So that the agreement above means something."""
    cosines = [tables(rope, 256)[0] for _, rope in ROPES.values() if rope.num_pairs(32) == 16]
    cosines.append(tables(ROPES["longrope"][1], 64)[0])
    for index, one in enumerate(cosines):
        for other in cosines[:index]:
            assert one.shape != other.shape or not torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("name", ROPES)
def test_both_orders_of_pairs_are_one_rotation(name: str) -> None:
    """Neighbours, put half a head apart and back, turn as pairs half a head apart do."""
    rope = ROPES[name][1]
    num_pairs, factor = rope.num_pairs(32), rope.attention_factor
    inv_freq = torch.tensor(inverse_frequencies(rope, 32, 256))
    x_THD = torch.randn(len(POSITIONS), 3, 32)
    cos, sin = (each.unsqueeze(1) for each in tables(rope, 256))
    expected = rotate_half_split(x_THD, cos, sin)
    half_split = ops.rope(x_THD, POSITIONS, inv_freq, False, factor)
    torch.testing.assert_close(half_split, expected, atol=1e-6, rtol=0)
    order = torch.arange(2 * num_pairs).view(2, num_pairs).T.reshape(-1)
    order = torch.cat((order, torch.arange(2 * num_pairs, 32)))
    interleaved = ops.rope(x_THD[..., order], POSITIONS, inv_freq, True, factor)
    torch.testing.assert_close(interleaved, expected[..., order], atol=1e-6, rtol=0)


def test_a_proportional_rotation_is_read_from_its_section() -> None:
    rope = RopeConfig(theta=1e6, scaling=ProportionalScaling(4, 2.0))
    values = twin_of(tiny_config(head_dim=32, rope=rope)).config.to_dict()
    assert config_of_hf(values, where="config.json").rope == rope
    values["rope_parameters"]["beta_fast"] = 2.0
    with pytest.raises(CheckpointError, match=r"rope_parameters\.beta_fast = 2\.0"):
        config_of_hf(values, where="config.json")
