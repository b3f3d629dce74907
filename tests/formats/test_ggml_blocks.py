"""Every block layout equals the format library's values, to the bit; formats are these blocks."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ggml_blocks import SCALES_AT, assert_same_bits, library_values, random_blocks
from tilewright.compiler.formats import FORMATS, STORED_NAMES, ggml_blocks, stored_format
from tilewright.compiler.formats.ggml_blocks import (
    DECODERS,
    LARGER,
    SIZES,
    dequantise,
    larger_blocks,
)
from tilewright.errors import CheckpointError, ConfigError


def test_the_tables_agree_with_the_library() -> None:
    assert set(DECODERS) == set(SCALES_AT) == set(SIZES)
    for name, size in SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == size


@pytest.mark.parametrize("dtype", DECODERS)
@pytest.mark.parametrize("num_blocks", [0, 1, 700])
def test_finite_blocks(dtype: str, num_blocks: int) -> None:
    blocks = random_blocks(dtype, num_blocks)
    got = dequantise(blocks, dtype)
    assert got.dtype == torch.float32
    assert got.shape == (num_blocks * SIZES[dtype][0],)
    if num_blocks:
        assert got.isfinite().all()
        assert got.unique().numel() > (2 if dtype.startswith("TQ") else 10)
        assert_same_bits(got, library_values(blocks, dtype))


@pytest.mark.parametrize("dtype", DECODERS)
@given(data=st.data())
def test_any_bytes(dtype: str, data: st.DataObject) -> None:
    """Scales that are inf, NaN or denormal included."""
    size = SIZES[dtype][1]
    raw = data.draw(st.binary(min_size=size, max_size=size))
    block = np.frombuffer(raw, np.uint8)[None]
    assert_same_bits(dequantise(block, dtype), library_values(block, dtype))


@pytest.mark.parametrize("dtype", DECODERS)
def test_pieces_are_the_whole(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(dtype, 23)
    whole = dequantise(blocks, dtype)
    monkeypatch.setattr(ggml_blocks, "CHUNK_VALUES", 1024)
    assert torch.equal(dequantise(blocks, dtype), whole)


@pytest.mark.parametrize("dtype", DECODERS)
def test_memory_is_the_values_and_little_more(dtype: str) -> None:
    blocks = random_blocks(dtype, (1 << 22) // SIZES[dtype][0])
    tracemalloc.start()
    try:
        num_bytes = dequantise(blocks, dtype).nbytes
        assert tracemalloc.get_traced_memory()[1] < 1.25 * num_bytes
    finally:
        tracemalloc.stop()


def test_the_second_half_of_the_scales_of_q4_k() -> None:
    """Groups 4 to 7 take their top bits from the bytes of groups 0 to 3: one by hand."""
    block = np.zeros((1, 144), np.uint8)
    block[0, :4] = np.array([1.0, 0.5], "<f2").view(np.uint8)
    block[0, 4 + 1] = 0b10_000011  # group 1: scale 3; group 5: scale 0b10....
    block[0, 8 + 1] = 0b01_000010  # group 1: minimum 2; group 5: minimum 0b01....
    block[0, 12 + 1] = 0b1100_0101  # group 5: scale 0b..0101, minimum 0b..1100
    block[0, 16 + 32 : 16 + 64] = 0x07  # group 2: 7 everywhere, group 3: 0
    block[0, 16 : 16 + 32] = 0x20  # group 0: 0, group 1: 2
    block[0, 16 + 64 : 16 + 96] = 0x10  # group 4: 0, group 5: 1
    groups = dequantise(block, "Q4_K").view(8, 32)
    assert groups[:, 0].tolist() == [0, 2 * 3 - 1, 0, 0, 0, 37 - 28 / 2, 0, 0]
    assert torch.equal(groups, groups[:, :1].expand(8, 32))


@pytest.mark.parametrize("dtype", LARGER)
def test_larger_blocks_have_equal_values(dtype: str) -> None:
    """Of finite scales, of inf and NaN, and in the format's own arithmetic."""
    blocks = random_blocks(dtype, 600)
    at = SCALES_AT[dtype][0]
    for number, scale in enumerate((0.0, -0.0, 6e-8, 65504.0, np.inf, np.nan)):
        blocks[number, at : at + 2] = np.array([scale], "<f2").view(np.uint8)
    expected = library_values(blocks, dtype)
    name, larger = larger_blocks(blocks.reshape(3, -1), dtype)
    assert STORED_NAMES[str(stored_format(dtype))] == name and len(larger) == 3
    assert_same_bits(dequantise(larger, name), expected)
    values = FORMATS[str(stored_format(dtype))].unpack(
        torch.from_numpy(larger.reshape(-1)), expected.shape
    )
    assert_same_bits(values, expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in SIZES if dtype in STORED_NAMES.values()])
def test_a_format_holds_exactly_these_bytes(dtype: str) -> None:
    """Sizes, and values along either axis, of several rows of blocks."""
    name = stored_format(dtype)
    assert name is not None
    block, block_bytes = SIZES[dtype]
    found = FORMATS[name]
    assert (found.block, found.nbytes((3, 2 * block))) == (block, 6 * block_bytes)
    blocks = random_blocks(dtype, 6)
    expected = library_values(blocks, dtype).reshape(3, 2 * block)
    data = torch.from_numpy(blocks.reshape(-1))
    assert_same_bits(found.unpack(data, (3, 2 * block)), expected)
    turned = found.unpack(data, (2 * block, 3), axis=0)
    assert_same_bits(turned, np.ascontiguousarray(expected.T))
    with pytest.raises(CheckpointError, match=f"bytes of {name}"):
        found.unpack(data[1:], (3, 2 * block))


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_k_quants_come_only_from_a_file(name: str) -> None:
    found = FORMATS[name]
    assert not found.is_offered
    for refused in (found.quantise, found.pack, found.round_trip):
        with pytest.raises(ConfigError, match=f"{name}: .* only from a file"):
            refused(torch.zeros(256))


def test_every_stored_type_is_a_format() -> None:
    assert [stored_format(stored) for stored in STORED_NAMES.values()] == list(STORED_NAMES)
    assert set(STORED_NAMES) <= set(FORMATS)
    assert stored_format("Q4_0+Q8_0") is None
