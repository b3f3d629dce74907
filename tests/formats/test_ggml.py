"""ggml's blocks with 32 values against the gguf package, bit for bit, and against slow versions."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.formats.slow_ggml import slow_q40, slow_q80
from tilewright.compiler.formats import FORMATS, GgmlFormat, ScaledEncoded
from tilewright.errors import CheckpointError, CompileError

KINDS = {
    "q40": gguf.GGMLQuantizationType.Q4_0,
    "q41": gguf.GGMLQuantizationType.Q4_1,
    "q50": gguf.GGMLQuantizationType.Q5_0,
    "q51": gguf.GGMLQuantizationType.Q5_1,
    "q80": gguf.GGMLQuantizationType.Q8_0,
}
SLOW: dict[str, Callable[[list[float]], bytes]] = {"q40": slow_q40, "q80": slow_q80}
BLOCK_BYTES = {"q40": 18, "q41": 20, "q50": 22, "q51": 24, "q80": 34}
STEPS = {"q40": 8, "q41": 15, "q50": 16, "q51": 31, "q80": 127}
WITH_MINIMUMS = ("q41", "q51")
SHAPES_AND_AXES = [((4, 64), -1), ((3, 40), -1), ((40, 3), 0), ((2, 33, 7), 1), ((5,), 0)]


def ggml_format(name: str) -> GgmlFormat:
    found = FORMATS[name]
    assert isinstance(found, GgmlFormat)
    return found


def library_bytes(x: torch.Tensor, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.quantize(x.numpy(), KINDS[name])


def same_bytes(got: torch.Tensor, expected: np.ndarray, name: str) -> bool:
    """Compare bytes. For q41 and q51, machines differ in the minimum for -0 and 0."""
    found = [data.reshape(-1, BLOCK_BYTES[name]).copy() for data in (got.numpy(), expected)]
    for blocks in found if name in WITH_MINIMUMS else ():
        for at in (0, 2):
            blocks[(blocks[:, at] == 0) & (blocks[:, at + 1] == 0x80), at + 1] = 0
    return np.array_equal(*found)


def library_values(data: np.ndarray, name: str) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data, KINDS[name]))


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare words. All NaN values are equal."""
    assert got.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    words = [x.contiguous().view(torch.int32)[~nan] for x in (got, expected)]
    assert torch.equal(*words)


def by_row(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Scale rows by powers of two in a range."""
    return torch.ldexp(x, torch.randint(low, high, (x.shape[0], 1)))


# Normal values. No scale is small enough for an infinite inverse.
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "half precision": lambda x: x.half().float(),
    "zeros": lambda x: x * 0,
    "one value": lambda x: x[:, :1].expand(x.shape).contiguous(),
    "equal magnitudes": lambda x: x.sign() * 1.5,
    "integers": lambda x: (x * 50).round(),
    "ties of q80": lambda x: torch.where(x > 2, 127.0, (x * 30).round() + 0.5),
    "ties of q40": lambda x: torch.where(x > 2, -8.0, (x * 2).round() + 0.5),
    "sparse": lambda x: x * (x > 1.7),
    "mixed exponents": lambda x: torch.ldexp(x, torch.randint(-60, 20, x.shape)),
    "scales at the bottom of float16": lambda x: by_row(x, -24, -14),
    "scales that round to zero": lambda x: by_row(x, -110, -30),
    "scales at the top of float16": lambda x: by_row(x, 16, 24),
    "scales beyond float16": lambda x: by_row(x, 30, 120),
    "largest": lambda x: x.sign() * (torch.rand(x.shape) + 1) * 2.0**126,
    "smallest": lambda x: (x.sign() + x / 8) * 2.0**-118,
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", ROWS)
def test_bytes_and_values_are_the_librarys(name: str, kind: str) -> None:
    x = ROWS[kind](torch.randn(500, 96))
    expected = library_bytes(x, name)
    packed = FORMATS[name].pack(x)
    assert packed.dtype == torch.uint8
    assert same_bytes(packed, expected, name)
    values = library_values(expected, name)
    assert_same_bits(FORMATS[name].round_trip(x), values)
    assert_same_bits(FORMATS[name].unpack(packed, x.shape), values)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
def test_odd_sizes_and_other_axes(name: str, shape: tuple[int, ...], axis: int) -> None:
    """Compare with the library on moved and zero-padded rows."""
    x = torch.randn(shape)
    moved = x.movedim(axis, -1).contiguous()
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % 32))
    expected = library_bytes(padded, name)
    packed = FORMATS[name].pack(x, axis=axis)
    assert packed.numel() == FORMATS[name].nbytes(shape, axis=axis)
    assert same_bytes(packed, expected, name)
    values = library_values(expected, name)[..., : moved.shape[-1]].movedim(-1, axis)
    assert_same_bits(FORMATS[name].round_trip(x, axis=axis), values)
    assert_same_bits(FORMATS[name].unpack(packed, shape, axis=axis), values)


@pytest.mark.parametrize("name", KINDS)
@given(raw=st.binary(min_size=68, max_size=68))
def test_any_bytes_unpack_to_the_librarys_values(name: str, raw: bytes) -> None:
    data = np.frombuffer(raw, np.uint8)[: BLOCK_BYTES[name] * 2].reshape(2, -1)
    values = FORMATS[name].unpack(torch.from_numpy(data.copy()), (2, 32))
    assert_same_bits(values, library_values(data, name))


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.floats(-4, 4, width=32)


@pytest.mark.parametrize("name", SLOW)
@given(block=st.one_of(*(st.lists(some, min_size=32, max_size=32) for some in (FINITE, NEAR))))
def test_blocks_are_those_of_the_slow_version(name: str, block: list[float]) -> None:
    """Include denormals and scales without a finite inverse."""
    packed = FORMATS[name].pack(torch.tensor(block))
    assert bytes(packed.tolist()) == SLOW[name](block)


@pytest.mark.parametrize("name", KINDS)
@given(
    block=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=70),
    power=st.integers(-8, 4),
)
def test_errors_are_within_a_step(name: str, block: list[float], power: int) -> None:
    """A step is the scale, plus the rounding of scale and minimum to float16."""
    x = torch.tensor(block) * 2.0 ** (power - 2 * (name in WITH_MINIMUMS))  # within float16
    error = (FORMATS[name].round_trip(x) - x).abs()
    for start in range(0, len(block), 32):
        part = x[start : start + 32]
        padded = torch.nn.functional.pad(part, (0, 32 - len(part)))
        largest = part.abs().max()
        spread = padded.max() - padded.min() if name in WITH_MINIMUMS else largest
        step = spread / STEPS[name]
        # q40 and q50 have an extra negative code, so the error may be a whole step.
        reach = step if name in ("q40", "q50") else step / 2
        rounding = (spread + largest * (name in WITH_MINIMUMS)) * 2.0**-10
        assert error[start : start + 32].max() <= reach * 1.001 + rounding + 2.0**-17


def test_sizes() -> None:
    assert [FORMATS[name].bits for name in KINDS] == [4.5, 5.0, 5.5, 6.0, 8.5]
    for name, block_bytes in BLOCK_BYTES.items():
        data_format = FORMATS[name]
        shared = 32 if name in WITH_MINIMUMS else 16
        assert (data_format.block, data_format.shared_bits) == (32, shared)
        assert data_format.nbytes((32,)) == block_bytes
        assert data_format.nbytes((3, 40)) == 3 * 2 * block_bytes
        assert data_format.nbytes((40, 3), axis=0) == 3 * 2 * block_bytes
        assert data_format.nbytes((0, 32)) == data_format.nbytes((3, 0)) == 0


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0,)])
def test_empty(name: str, shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape)
    assert FORMATS[name].round_trip(x).shape == shape
    assert FORMATS[name].unpack(FORMATS[name].pack(x), shape).shape == shape


@pytest.mark.parametrize("name", KINDS)
def test_what_a_target_lays_out(name: str) -> None:
    x = torch.randn(6, 50)
    data_format = ggml_format(name)
    encoded = data_format.quantise(x, axis=0)
    assert encoded.codes.shape == (50, 6) and encoded.scales.shape == (50, 1)
    assert encoded.codes.dtype == (torch.int8 if name == "q80" else torch.uint8)
    assert encoded.scales.dtype == torch.float16
    values = (encoded.codes.float() - data_format.zero_point) * data_format.scales(encoded)
    assert (encoded.minimums is not None) == (name in WITH_MINIMUMS)
    if encoded.minimums is not None:
        values += encoded.minimums.float()
    assert torch.equal(values.T, data_format.round_trip(x, axis=0))


def test_by_hand() -> None:
    x = torch.zeros(32)
    x[0], x[1], x[16] = -8.0, 3.0, 6.6
    encoded = ggml_format("q40").quantise(x)
    assert encoded.scales.item() == 1.0
    assert encoded.codes.tolist() == [0, 11, *[8] * 14, 15, *[8] * 15]
    expected = [*struct.pack("<e", 1.0), 0xF0, 0x8B, *[0x88] * 14]
    assert FORMATS["q40"].pack(x).tolist() == expected
    x = torch.tensor([127.0, -0.5, 0.5, 1.5, -63.49])
    encoded = ggml_format("q80").quantise(x)
    assert encoded.codes.tolist() == [127, -1, 1, 2, -63]
    assert FORMATS["q80"].pack(x).tolist()[:7] == [*struct.pack("<e", 1.0), 127, 255, 1, 2, 193]


def test_the_largest_magnitude_keeps_its_sign_and_the_first_wins() -> None:
    values = FORMATS["q40"].round_trip(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
    assert values.tolist() == [[1.0, -0.875], [-1.0, 0.875]]


def test_the_inverse_is_of_the_scale_before_it_is_rounded() -> None:
    """Division by the float16 scale gives other codes than the library."""
    x = torch.randn(2000, 32)
    codes = ggml_format("q80").quantise(x).codes
    scales = ggml_format("q80").quantise(x).scales.float()
    assert not torch.equal((x / scales).round().to(torch.int8), codes)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_never_looks_finite(name: str, bad: float) -> None:
    x = torch.randn(2, 64)
    x[0, 40] = bad
    values = FORMATS[name].round_trip(x)
    assert not values[0, 32:].isfinite().any()
    assert torch.equal(values[1], FORMATS[name].round_trip(x[1]))
    assert torch.equal(values[0, :32], FORMATS[name].round_trip(x[0, :32]))
    packed = FORMATS[name].pack(x)
    assert_same_bits(FORMATS[name].unpack(packed, x.shape), values)


@pytest.mark.parametrize("name", KINDS)
def test_a_scale_beyond_float16_is_refused_where_it_is_used(name: str) -> None:
    data_format = ggml_format(name)
    for x in (torch.tensor([1.0, 1e7]), torch.tensor([math.nan]), torch.tensor([math.inf])):
        with pytest.raises(CompileError, match=rf"{name}: the scale of a block is inf or NaN; all"):
            data_format.scales(data_format.quantise(x))
    assert not data_format.round_trip(torch.tensor([1.0, 1e7]))[1].isfinite()


@pytest.mark.parametrize("name", KINDS)
def test_what_has_no_inverse_is_zero(name: str) -> None:
    """Values and scale are zero."""
    x = torch.randn(4, 32) * 2.0**-135
    assert not (x == 0).any()
    assert not FORMATS[name].round_trip(x).any()
    assert not ggml_format(name).quantise(x).scales.any()


@pytest.mark.parametrize("name", KINDS)
def test_chunks_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(37, 70)
    whole = ggml_format(name).quantise(x)
    values = FORMATS[name].round_trip(x)
    monkeypatch.setattr("tilewright.compiler.formats.rows.CHUNK_ELEMENTS", 300)
    pieces = ggml_format(name).quantise(x)
    assert torch.equal(pieces.codes, whole.codes) and torch.equal(pieces.scales, whole.scales)
    assert torch.equal(FORMATS[name].round_trip(x), values)


@pytest.mark.parametrize("name", KINDS)
def test_other_float_types_and_views(name: str) -> None:
    x = torch.randn(64, 96)
    for dtype, view in itertools.product((torch.bfloat16, torch.float16), (x, x.T, x[::2, ::3])):
        narrow = view.to(dtype)
        assert torch.equal(
            FORMATS[name].round_trip(narrow), FORMATS[name].round_trip(narrow.float().contiguous())
        )
        kept = view.clone()
        FORMATS[name].round_trip(view)
        assert torch.equal(view, kept)


@pytest.mark.parametrize("name", KINDS)
def test_unpack_refuses_another_size(name: str) -> None:
    packed = FORMATS[name].pack(torch.randn(2, 32))
    with pytest.raises(CheckpointError, match=rf"bytes of {name} for shape \[2, 32\]; allowed: "):
        FORMATS[name].unpack(packed[:-1], (2, 32))


def test_encodings_are_not_mixed_up() -> None:
    encoded = ggml_format("q80").quantise(torch.ones(32))
    assert isinstance(encoded, ScaledEncoded)
    for name in ("bfp8", "fp32"):
        with pytest.raises(AssertionError):
            FORMATS[name].dequantise(encoded)


def test_accuracy_of_normal_values() -> None:
    x = torch.randn(512, 512)
    errors = {name: float((FORMATS[name].round_trip(x) - x).std()) for name in KINDS}
    assert 0.07 < errors["q40"] < 0.10
    assert 0.004 < errors["q80"] < 0.008
