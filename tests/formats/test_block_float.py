"""The host packing of bfp8, bfp4 and bfp2 by hand-computed cases and against a slow reference."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.slow_blocks import slow_pack, slow_unpack
from tilewright.compiler.formats import FORMATS, BlockEncoded, BlockFloat
from tilewright.errors import CompileError

GOLDENS = Path(__file__).parents[1] / "goldens"
BLOCK_FORMATS = ("bfp8", "bfp4", "bfp2")


def block_format(name: str) -> BlockFloat:
    found = FORMATS[name]
    assert isinstance(found, BlockFloat)
    return found


def from_bits(*bits: int) -> torch.Tensor:
    return torch.tensor([struct.unpack("<f", struct.pack("<I", b))[0] for b in bits])


def to_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


def tensor_bits(x: torch.Tensor) -> list[int]:
    return [bits & 0xFFFFFFFF for bits in x.contiguous().view(torch.int32).reshape(-1).tolist()]


def mantissas_of(name: str, *values: float) -> list[int]:
    encoded = block_format(name).quantise(torch.tensor(values, dtype=torch.float32))
    return encoded.mantissas.tolist()


def test_sizes() -> None:
    assert [FORMATS[name].bits for name in BLOCK_FORMATS] == [8.5, 4.5, 2.5]
    assert FORMATS["bfp8"].nbytes((32, 32)) == 1088
    assert FORMATS["bfp4"].nbytes((32, 32)) == 576
    assert FORMATS["bfp2"].nbytes((32, 32)) == 320
    assert FORMATS["bfp4"].nbytes((3, 20)) == 3 * 2 * 9
    assert FORMATS["bfp4"].nbytes((20, 3), axis=0) == 3 * 2 * 9
    assert FORMATS["bfp8"].nbytes((0, 16)) == 0


def test_exponent_is_the_largest_and_value_formula_holds() -> None:
    encoded = block_format("bfp8").quantise(torch.tensor([4.0, -1.0, 0.5]))
    assert encoded.exponents.tolist() == [129]
    assert encoded.mantissas.tolist() == [64, -16, 8]
    assert encoded.mantissas.dtype == torch.int8
    assert encoded.exponents.dtype == torch.uint8


def test_saturates_instead_of_raising_the_exponent() -> None:
    assert mantissas_of("bfp8", 1.9999) == [127]
    assert FORMATS["bfp8"].round_trip(torch.tensor([1.9999])).item() == 127 / 64
    assert mantissas_of("bfp4", -1.99) == [-7]
    assert mantissas_of("bfp2", 1.6) == [1]


def test_ties_go_to_even() -> None:
    # In the block of 1.0 a step of bfp8 is 1/64.
    ties = [1.0, 1 + 1 / 128, 1 + 3 / 128, -(1 + 5 / 128), 1 / 128, 3 / 128]
    assert mantissas_of("bfp8", *ties) == [64, 64, 66, -66, 0, 2]


def test_bits_lost_in_the_alignment_do_not_break_a_tie() -> None:
    # 2**-7 + 2**-30 is a tie plus a trace: the trace is shifted out, and the tie goes to even (0).
    above = 2.0**-7 * (1 + 2.0**-23)
    assert mantissas_of("bfp8", 1.0, above) == [64, 0]
    # The same trace inside the 24 bits counts.
    assert mantissas_of("bfp8", 1.0, 2.0**-7 * (1 + 2.0**-16)) == [64, 1]


def test_a_value_that_rounds_to_zero_has_no_sign() -> None:
    values = FORMATS["bfp8"].round_trip(torch.tensor([1.0, -1e-6, -0.0]))
    assert tensor_bits(values) == [to_bits(1.0), 0, 0]


def test_denormals_are_zero_even_alone() -> None:
    values = from_bits(0x00000001, 0x807FFFFF)
    encoded = block_format("bfp8").quantise(values)
    assert encoded.exponents.tolist() == [0]
    assert tensor_bits(block_format("bfp8").dequantise(encoded)) == [0, 0]


def test_smallest_and_largest_normals_survive() -> None:
    for bits in (0x00800000, 0x7F000000, 0xFF7E0000):
        assert tensor_bits(FORMATS["bfp8"].round_trip(from_bits(bits))) == [bits]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_inf_takes_the_exponent(name: str) -> None:
    encoded = block_format(name).quantise(torch.tensor([math.inf, -math.inf, 1.0, -1e30]))
    assert encoded.exponents.tolist() == [255]
    values = block_format(name).dequantise(encoded)
    assert values.tolist() == [math.inf, -math.inf, 0.0, 0.0]


@pytest.mark.parametrize("name", ["bfp8", "bfp4"])
def test_nan_stays_nan(name: str) -> None:
    values = FORMATS[name].round_trip(torch.tensor([math.nan, 1.0]))
    assert math.isnan(values[0])
    assert values[1] == 0
    assert torch.isinf(FORMATS["bfp2"].round_trip(torch.tensor([math.nan]))).all()


def test_underflow_flushes_when_unpacking() -> None:
    encoded = BlockEncoded(
        exponents=torch.tensor([1, 2], dtype=torch.uint8),
        mantissas=torch.tensor([64, 32, -1] + [0] * 13 + [32, 16], dtype=torch.int8),
        axis=-1,
    )
    values = block_format("bfp8").dequantise(encoded)
    assert tensor_bits(values)[:3] == [0x00800000, 0, 0]
    assert tensor_bits(values)[16:] == [0x00800000, 0]


def test_partial_block_is_as_if_padded_with_zeros() -> None:
    x = torch.randn(5, 37)
    padded = torch.nn.functional.pad(x, (0, 11))
    for name in BLOCK_FORMATS:
        whole = FORMATS[name].round_trip(padded)[:, :37]
        assert torch.equal(FORMATS[name].round_trip(x), whole)
        encoded = block_format(name).quantise(x)
        assert encoded.exponents.shape == (5, 3)
        assert encoded.mantissas.shape == x.shape


def test_axis_chooses_where_blocks_run() -> None:
    x = torch.randn(3, 40, 24)
    for axis in (0, 1, -1, -2):
        moved = FORMATS["bfp4"].round_trip(x.movedim(axis, -1)).movedim(-1, axis)
        assert torch.equal(FORMATS["bfp4"].round_trip(x, axis=axis), moved)
        encoded = block_format("bfp4").quantise(x, axis=axis)
        assert torch.equal(block_format("bfp4").dequantise(encoded), moved)
    assert not torch.equal(FORMATS["bfp4"].round_trip(x), FORMATS["bfp4"].round_trip(x, axis=1))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 64)
    whole = block_format("bfp4").quantise(x)
    monkeypatch.setattr("tilewright.compiler.formats.rows.CHUNK_ELEMENTS", 200)
    parts = block_format("bfp4").quantise(x)
    assert torch.equal(whole.exponents, parts.exponents)
    assert torch.equal(whole.mantissas, parts.mantissas)
    values = block_format("bfp4").dequantise(whole)
    assert torch.equal(FORMATS["bfp4"].round_trip(x), values)


def test_empty_tensors() -> None:
    for shape in ((0, 16), (4, 0)):
        x = torch.empty(shape)
        assert FORMATS["bfp8"].round_trip(x).shape == x.shape
        assert block_format("bfp8").dequantise(block_format("bfp8").quantise(x)).shape == x.shape


words = st.one_of(
    st.integers(0, 0xFFFFFFFF),
    # Near one another, so that alignment and rounding matter.
    st.builds(
        lambda sign, exponent, fraction: sign << 31 | exponent << 23 | fraction,
        st.integers(0, 1),
        st.integers(118, 130),
        st.one_of(st.integers(0, 0x7FFFFF), st.integers(0, 0xFF).map(lambda high: high << 15)),
    ),
    st.sampled_from([0, 1 << 31, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]),
)


@given(st.lists(words, min_size=16, max_size=16))
def test_equals_the_slow_reference(block: list[int]) -> None:
    check_against_slow(from_bits_exact(block))


def test_equals_the_slow_reference_on_many_random_values() -> None:
    generator = torch.Generator().manual_seed(1)
    near = torch.randn(128, 16, generator=generator).view(torch.int32)
    spread = torch.randint(-(2**31), 2**31, (128, 16), generator=generator, dtype=torch.int64)
    for row in torch.cat([near, spread.to(torch.int32)]):
        check_against_slow(row)


def from_bits_exact(block: list[int]) -> torch.Tensor:
    # Through integers: a Python float would quieten a signalling NaN.
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in block], dtype=torch.int32)


def check_against_slow(words_16: torch.Tensor) -> None:
    block = [word & 0xFFFFFFFF for word in words_16.tolist()]
    x = words_16.view(torch.float32)
    for name in BLOCK_FORMATS:
        bits = block_format(name).mantissa_bits
        shared, signed = slow_pack(block, bits)
        encoded = block_format(name).quantise(x)
        assert (encoded.exponents.tolist(), encoded.mantissas.tolist()) == ([shared], signed)
        expected = [slow_unpack(shared, element, bits) for element in signed]
        assert tensor_bits(block_format(name).dequantise(encoded)) == expected


@pytest.mark.parametrize("name, expected", [("bfp8", 0.0076), ("bfp4", 0.117)])
def test_relative_rms_error_on_normal_bf16_values(name: str, expected: float) -> None:
    x = torch.randn(1024, 1024).bfloat16().float()
    error = FORMATS[name].round_trip(x) - x
    assert math.isclose((error.norm() / x.norm()).item(), expected, rel_tol=0.01)


@pytest.mark.parametrize("name, expected", [("bfp8", 0.0093), ("bfp4", 0.21)])
def test_relative_rms_error_of_device_packing(name: str, expected: float) -> None:
    x = torch.randn(1024, 1024).bfloat16().float()
    error = block_format(name).device_round_trip(x) - x
    assert math.isclose((error.norm() / x.norm()).item(), expected, rel_tol=0.01)


def test_casts_and_packing_differ_as_published() -> None:
    """The published count for a P300 is 7,716 elements."""
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    cast, packed = (
        block_format("bfp8").cast_round_trip(x),
        block_format("bfp8").device_round_trip(x),
    )
    assert 7400 < int((cast != packed).sum()) < 7800
    errors = [(values - x).abs().mean().item() for values in (cast, packed)]
    assert errors == pytest.approx([5.84e-3, 6.9e-3], rel=0.03)


def test_device_packing_equals_what_the_library_packed() -> None:
    lines = (GOLDENS / "device_packing.txt").read_text().splitlines()
    for line in lines:
        given_words, packed = (
            [int(word, 16) << 16 for word in half.split()] for half in line.split(" | ")
        )
        x = from_bits_exact(given_words).view(torch.float32)
        assert tensor_bits(block_format("bfp8").device_round_trip(x)) == packed
        # The cases were chosen to differ from host packing.
        assert tensor_bits(FORMATS["bfp8"].round_trip(x)) != packed


def test_device_packing_of_special_values() -> None:
    bfp8 = block_format("bfp8")
    assert bfp8.device_round_trip(torch.tensor([math.nan, 1.0])).tolist() == [math.inf, 0.0]
    assert tensor_bits(bfp8.device_round_trip(from_bits(0x807FFFFF))) == [0]
    # Half away from zero, and the exponent is taken after rounding: 1.9999 becomes 2.
    values = bfp8.device_round_trip(torch.tensor([1 + 1 / 128, -1.9999, 1 / 64]))
    assert values.tolist() == [1 + 1 / 32, -2.0, 1 / 32]


def test_finite_values_are_exact_in_bf16() -> None:
    x = torch.randn(256, 256) * torch.logspace(-30, 30, 256).unsqueeze(1)
    for name in BLOCK_FORMATS:
        values = FORMATS[name].round_trip(x)
        assert torch.equal(values, values.bfloat16().float())


def test_quantising_twice_changes_nothing() -> None:
    for name in BLOCK_FORMATS:
        once = FORMATS[name].round_trip(torch.randn(64, 64))
        assert torch.equal(FORMATS[name].round_trip(once), once)


def test_scales_are_exact_factors() -> None:
    x = torch.randn(8, 32) * torch.logspace(-37, 37, 8).unsqueeze(1)
    encoded = block_format("bfp8").quantise(x)
    scales = block_format("bfp8").scales(encoded)
    assert scales.dtype == torch.float32
    products = encoded.mantissas.double() * scales.double().repeat_interleave(16, dim=-1)
    assert torch.equal(products.float(), block_format("bfp8").dequantise(encoded))


def test_scales_refuse_inf() -> None:
    encoded = block_format("bfp8").quantise(torch.tensor([math.inf]))
    with pytest.raises(CompileError, match="bfp8: a block holds inf or NaN; allowed: finite"):
        block_format("bfp8").scales(encoded)
