"""Packings against slow references over thousands of blocks, all codes, and speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.slow_blocks import (
    slow_cast_pack,
    slow_device_pack,
    slow_pack,
    slow_unpack,
)
from tilewright.compiler.formats import FORMATS, BlockEncoded, BlockFloat, block_codec

BLOCK_FORMATS = ("bfp8", "bfp4", "bfp2")
SPECIALS = (0, 1, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000)
# Exponents at the limits and near the change from integers to floats.
TOP_EXPONENTS = (0, 1, 2, 6, 7, 22, 23, 24, 25, 126, 127, 128, 252, 253, 254, 255)

SlowPack = Callable[[list[int], int], tuple[int, list[int]]]


def block_format(name: str) -> BlockFloat:
    found = FORMATS[name]
    assert isinstance(found, BlockFloat)
    return found


def as_tensor(blocks: list[list[int]]) -> torch.Tensor:
    # Use integers: a Python float would quiet a signaling NaN.
    signed = [[w - (1 << 32) if w >> 31 else w for w in block] for block in blocks]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def as_words(x: torch.Tensor) -> list[list[int]]:
    rows = x.contiguous().view(torch.int32).tolist()
    return [[word & 0xFFFFFFFF for word in row] for row in rows]


def random_block(rng: random.Random) -> list[int]:
    """Return values with exponents near the block's maximum and fractions near ties."""
    top = rng.choice(TOP_EXPONENTS) if rng.random() < 0.5 else rng.randrange(256)
    spread = rng.choice((0, 2, 8, 30))
    words = []
    for _ in range(16):
        exponent = max(0, top - rng.randint(0, spread))
        fraction = rng.getrandbits(23)
        if rng.random() < 0.5:  # a tie, or a neighbor, at some position
            place = rng.randrange(23)
            fraction = (fraction >> place | 1) << place
            fraction = min(max(fraction + rng.choice((-1, 0, 0, 1)), 0), 0x7FFFFF)
        words.append(rng.getrandbits(1) << 31 | exponent << 23 | fraction)
    if rng.random() < 0.3:
        words[rng.randrange(16)] = rng.choice(SPECIALS) | rng.getrandbits(1) << 31
    return words


def check(blocks: list[list[int]], encoder: block_codec.RowEncoder, slow: SlowPack) -> None:
    """Compare codes and values for stacked blocks, which share chunks."""
    for name in BLOCK_FORMATS:
        bits = block_format(name).mantissa_bits
        expected = [slow(block, bits) for block in blocks]
        exponents, mantissas = block_codec.map_rows(as_tensor(blocks), bits, encoder)
        assert exponents.flatten().tolist() == [shared for shared, _ in expected]
        assert mantissas.tolist() == [signed for _, signed in expected]
        values = block_codec.round_trip_rows(as_tensor(blocks), bits, encoder)
        assert as_words(values) == [
            [slow_unpack(shared, element, bits) for element in signed]
            for shared, signed in expected
        ]


PACKINGS = [
    pytest.param(block_codec.encode_host, slow_pack, id="host"),
    pytest.param(block_codec.encode_device, slow_device_pack, id="device"),
    pytest.param(block_codec.encode_cast, slow_cast_pack, id="cast"),
]


@pytest.mark.parametrize(("encoder", "slow"), PACKINGS)
def test_thousands_of_values(encoder: block_codec.RowEncoder, slow: SlowPack) -> None:
    rng = random.Random(5)
    check([random_block(rng) for _ in range(1000)], encoder, slow)


@pytest.mark.parametrize(("encoder", "slow"), PACKINGS)
def test_blocks_one_by_one(encoder: block_codec.RowEncoder, slow: SlowPack) -> None:
    """Each block selects its own arithmetic in a chunk."""
    rng = random.Random(6)
    for _ in range(200):
        check([random_block(rng)], encoder, slow)


@pytest.mark.parametrize(("encoder", "slow"), PACKINGS)
@given(st.randoms(use_true_random=False))
def test_any_blocks(encoder: block_codec.RowEncoder, slow: SlowPack, rng: random.Random) -> None:
    check([random_block(rng) for _ in range(3)], encoder, slow)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_neighbour_does_not_change_a_block(name: str) -> None:
    """A block with zeros, denormals or NaN does not change other blocks in its chunk."""
    x = torch.randn(64, 32) * torch.logspace(-20, 20, 64).unsqueeze(1)
    before = block_format(name).quantise(x)
    for words in ([0] * 16, [1] * 16, [0x7FC00000] * 16, [0x7F800000] * 16):
        after = block_format(name).quantise(torch.cat([x, as_tensor([words * 2])]))
        assert torch.equal(after.exponents[:64], before.exponents)
        assert torch.equal(after.mantissas[:64], before.mantissas)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_code_there_is(name: str) -> None:
    """Check all exponents and magnitudes. bf16 represents every finite value."""
    bits = block_format(name).mantissa_bits
    limit = (1 << bits) - 1
    magnitudes = torch.arange(-limit, limit + 1)
    mantissas = torch.nn.functional.pad(magnitudes, (0, -len(magnitudes) % 16))
    encoded = BlockEncoded(
        exponents=torch.arange(256)
        .repeat_interleave(len(mantissas) // 16)
        .to(torch.uint8)
        .view(256, -1),
        mantissas=mantissas.repeat(256, 1).to(torch.int8),
        axis=-1,
    )
    values = block_format(name).dequantise(encoded)
    power = torch.exp2(torch.arange(256.0, dtype=torch.float64) - 127 - (bits - 1))
    expected = mantissas.double() * power.unsqueeze(1)
    expected[expected.abs() < 2.0**-126] = 0
    finite = expected.abs() < 2.0**128
    assert torch.equal(values[finite].double(), expected[finite])
    assert not values[~finite].isfinite().any()
    assert int((~finite).sum()) == 2**bits
    assert torch.equal(values[finite].bfloat16().float(), values[finite])
    # Without underflow the encoder takes a shorter path with equal results.
    for shared in (*range(12), 254, 255):
        row = BlockEncoded(encoded.exponents[shared], encoded.mantissas[shared], -1)
        assert as_words(block_format(name).dequantise(row)[None]) == as_words(values[shared][None])
    # Decoded values encode exactly. The exponent may be smaller than before.
    kept = block_format(name).round_trip(values[:255])
    assert torch.equal(kept, values[:255])


def test_speed_of_an_embedding() -> None:
    x = torch.randn(49_152, 576)
    seconds = []
    for _ in range(2):
        start = time.process_time()
        FORMATS["bfp8"].round_trip(x)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1.5
