"""Scaled codes: values by the definition, bit for bit, and the nearest code for every value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewright.compiler.formats import (
    FP8,
    MXFP4,
    NF4,
    NVFP4,
    ScaledCodes,
    ScaledEncoded,
    get_format,
)
from tilewright.compiler.formats.scaled_codes import E2M1
from tilewright.errors import CheckpointError, ConfigError

SHAPES_AND_AXES = [((4, 256), -1), ((3, 200), -1), ((200, 3), 0), ((2, 130, 7), 1), ((5,), 0)]


def e4m3(byte: int) -> float:
    """Return the value of a code by its fields."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


CODES = [byte for byte in range(256) if byte & 0x7F != 0x7F]
VALUES = np.array([e4m3(byte) for byte in CODES])


def test_bytes_decode_to_the_float32_product_of_code_and_scale() -> None:
    rng = np.random.default_rng(1)
    codes = rng.choice(np.array(CODES, np.uint8), (6, 128))
    scales = np.array([1e-40, 0.0, 3e-5, 1.7, -2.5, 1e30], np.float32)
    blocks = np.concatenate([scales[:, None].view(np.uint8), codes], axis=1)
    data = torch.from_numpy(blocks.reshape(-1))
    exact = np.array([[e4m3(int(code)) for code in row] for row in codes]) * scales[:, None]
    expected = torch.from_numpy(exact.astype(np.float32))
    for shape in ((6, 128), (3, 256)):
        values = FP8.unpack(data, shape)
        assert torch.equal(values.view(torch.int32), expected.view(shape).view(torch.int32))
    encoded = FP8.read(data, (2, 300))
    again = FP8.read(FP8.pack_encoded(encoded), (2, 300))
    assert torch.equal(again.codes, encoded.codes) and torch.equal(again.scales, encoded.scales)


@pytest.mark.parametrize(("shape", "axis"), SHAPES_AND_AXES)
def test_packed_values_equal_the_round_trip(shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape)
    packed = FP8.pack(x, axis=axis)
    assert packed.numel() == FP8.nbytes(shape, axis=axis)
    values = FP8.round_trip(x, axis=axis)
    assert torch.equal(FP8.unpack(packed, shape, axis=axis), values)
    assert float((values - x).abs().max()) <= float(x.abs().max()) / 16


def test_quantize_selects_the_nearest_code() -> None:
    x = torch.randn(3, 128) * torch.tensor([[1.0], [1e-30], [1e-44]])
    x[1, 5:9] = 0
    encoded = FP8.quantise(x)
    assert get_format("fp8") is FP8 and FP8.bits == 8.25
    scale = (x.abs().amax(1) / 448).double().numpy()
    assert np.array_equal(encoded.scales[:, 0].double().numpy(), scale)
    for line in (0, 1):
        found = np.abs(np.array([e4m3(int(code)) for code in encoded.codes[line]]))
        wanted = np.abs(x[line].double().numpy()) / scale[line]
        nearest = np.abs(VALUES[None, :] - wanted[:, None]).min(1)
        assert np.all(np.abs(found - wanted) <= nearest * (1 + 1e-6) + 1e-6)
    assert bool(FP8.round_trip(x).isfinite().all())
    assert bool((FP8.round_trip(torch.zeros(2, 128)) == 0).all())


def test_mxfp4_stores_exponents_in_bytes() -> None:
    """Against the definition: codes times 2 ** (byte - 127)."""
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (6, 17), np.uint8)
    blocks[:, 0] = (1, 27, 100, 127, 200, 250)
    codes = np.stack((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), axis=-1).reshape(6, 32)
    expected = np.array(E2M1)[codes] * np.exp2(blocks[:, :1] - 127.0)
    data = torch.from_numpy(blocks.reshape(-1))
    assert get_format("mxfp4") is MXFP4 and MXFP4.bits == 4.25 and MXFP4.is_offered
    values = MXFP4.unpack(data, (3, 64)).view(6, 32)
    assert np.array_equal(values.numpy(), expected.astype(np.float32))
    assert torch.equal(MXFP4.pack_encoded(MXFP4.read(data, (2, 96))), data)


def test_unpack_refuses_another_size() -> None:
    with pytest.raises(CheckpointError, match=r"bytes of fp8 for shape \[2, 130\]; allowed: 528"):
        FP8.unpack(torch.zeros(527, dtype=torch.uint8), (2, 130))


def test_pairs_of_4_bit_codes_decode_with_a_scale_per_16() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(3, 2)
    scales = torch.tensor([[0.0, 1.5], [-2.5, 3e-5], [1e30, 1.7]])
    packed = NVFP4.pack_encoded(ScaledEncoded(codes, scales, -1))
    assert packed.numel() == NVFP4.nbytes((3, 32)) == 3 * 24 and NVFP4.bits == 6
    pairs = packed.view(6, 12)[:, 4:]
    assert torch.equal(pairs[0], torch.arange(0, 16, 2, dtype=torch.uint8) * 17 + 16)
    exact = np.array(E2M1)[codes.numpy()] * scales.double().numpy().repeat(16, axis=1)
    expected = torch.from_numpy(exact.astype(np.float32))
    assert torch.equal(NVFP4.unpack(packed, (3, 32)), expected)
    found = NVFP4.read(packed, (3, 20))
    assert torch.equal(NVFP4.dequantise(found), expected[:, :20])
    assert NF4.bits == 4.5 and not NF4.is_offered
    with pytest.raises(ConfigError, match=r"nf4: nothing is quantized to it; .* from a file"):
        NF4.quantise(torch.ones(1, 64))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_4_bit_float_codes_are_nearest_to_the_values(name: str) -> None:
    """Against a search over all codes, and the definition of the scales."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(12, 96, generator=random) * torch.logspace(-30, 30, 12).unsqueeze(1)
    x[3, :32] = 0
    format_ = get_format(name)
    assert isinstance(format_, ScaledCodes)
    encoded = format_.quantise(x)
    blocks = x.view(12, -1, format_.block).double()
    scales = encoded.scales.double().unsqueeze(-1)
    largest = blocks.abs().amax(-1, keepdim=True)
    if name == "mxfp4":
        powers = scales[largest > 0].log2()
        assert torch.equal(powers, powers.round())
        ratio = largest / scales
        assert bool(((ratio >= 4) & (ratio < 8))[largest > 0].all())
    else:
        off = (scales * 6 - largest).abs()
        assert bool((off <= largest / 16).all())
        assert torch.equal(torch.frexp(scales)[0] * 16, (torch.frexp(scales)[0] * 16).round())
    values = format_.dequantise(encoded).view_as(blocks).double()
    choices = torch.tensor(E2M1, dtype=torch.double) * scales.unsqueeze(-1)
    best = (choices - blocks.unsqueeze(-1)).abs().amin(-1)
    assert torch.allclose((values - blocks).abs(), best, rtol=1e-6, atol=0)
    assert torch.equal(format_.unpack(format_.pack(x), x.shape), values.float().view_as(x))
    if name == "mxfp4":
        assert torch.equal(format_.round_trip(values.float().view_as(x)), values.float().view_as(x))


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_value_that_is_not_finite_is_nan(name: str, value: float) -> None:
    format_, x = get_format(name), torch.ones(1, 256)
    x[0, 3] = value
    is_nan = torch.arange(256).view(1, -1) < format_.block
    for values in (format_.round_trip(x), format_.unpack(format_.pack(x), x.shape)):
        assert torch.equal(values.isnan(), is_nan)
