"""Calibration methods on random matrices: errors, grids, encodings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewright.compiler.calibration import methods
from tilewright.compiler.calibration.grids import grid_of
from tilewright.compiler.calibration.methods import factorize, gptq, imatrix
from tilewright.compiler.formats import get_format
from tilewright.compiler.formats.coded_rows import code_rows, decode_rows
from tilewright.errors import CompileError

FORMATS = ("bfp2", "bfp4", "bfp8", "q40", "q41", "q50", "q51", "q80", "mxfp4", "nvfp4")


def correlated(size: int, seed: int = 0) -> Tensor:
    """Second moments of correlated inputs with a few large channels."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.eye(size) + torch.randn(size, size, generator=generator) * 0.1
    x = torch.randn(4 * size, size, generator=generator) @ mix
    x[:, ::17] *= 8
    return x.T @ x / x.shape[0]


def output_error(weight_ND: Tensor, values_ND: Tensor, moments_DD: Tensor) -> float:
    """Relative squared output error on the calibration text."""
    off = weight_ND - values_ND
    return float(((off @ moments_DD) * off).sum() / ((weight_ND @ moments_DD) * weight_ND).sum())


def weight(rows: int, size: int) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(1)) * 0.05


@pytest.mark.parametrize("name", FORMATS)
def test_gptq_lowers_the_output_error_of_every_format(name: str) -> None:
    format_, moments, dense = get_format(name), correlated(64), weight(48, 64)
    grid = grid_of(format_)
    assert grid is not None
    factors = factorize(moments, format_.block)

    def error(values: Tensor) -> float:
        return output_error(dense, values, moments)

    nearest = error(format_.round_trip(dense))
    diagonal = error(format_.dequantise(imatrix(dense, grid, moments.diagonal())))
    plain = error(format_.dequantise(gptq(dense, grid, factors, passes=0)))
    best = error(format_.dequantise(gptq(dense, grid, factors)))
    assert best <= plain * 1.02 and plain < 0.8 * nearest
    assert diagonal < 1.02 * nearest


@pytest.mark.parametrize("name", ["bfp4", "bfp2"])
@pytest.mark.parametrize("rows", [48, 40])
def test_gptq_along_out_has_blocks_of_each_column(name: str, rows: int) -> None:
    format_, moments, dense = get_format(name), correlated(64), weight(rows, 64)
    grid = grid_of(format_)
    assert grid is not None
    encoded = gptq(dense, grid, factorize(moments, 1), along_out=True)
    values = format_.dequantise(encoded).T.contiguous()
    assert torch.equal(format_.round_trip(values, axis=0), values), "packing changes nothing"
    nearest = output_error(dense, format_.round_trip(dense, axis=0), moments)
    assert output_error(dense, values, moments) < 0.8 * nearest


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [64, 72])
def test_coded_rows_decode_to_the_values_of_the_encoding(name: str, size: int) -> None:
    format_, dense = get_format(name), weight(5, size)
    grid = grid_of(format_)
    assert grid is not None
    for encoded in (
        format_.quantise(dense),
        gptq(dense, grid, factorize(correlated(size), format_.block)),
    ):
        rows = code_rows(format_, encoded)
        assert rows.shape == (5, format_.nbytes((1, size)))
        assert torch.equal(decode_rows(format_, rows, size), format_.dequantise(encoded))
        assert torch.equal(decode_rows(format_, rows[2:4], size), format_.dequantise(encoded)[2:4])


@pytest.mark.parametrize("name", ["bfp2", "bfp4", "bfp8", "mxfp4"])
def test_packing_calibrated_block_floats_changes_nothing(name: str) -> None:
    format_, dense = get_format(name), weight(32, 64)
    grid = grid_of(format_)
    assert grid is not None
    values = format_.dequantise(gptq(dense, grid, factorize(correlated(64), format_.block)))
    assert torch.equal(format_.round_trip(values), values)
    assert torch.equal(values.bfloat16().float(), values)


def test_dead_channels_and_zero_blocks_stay_finite() -> None:
    moments, dense = correlated(64), weight(16, 64)
    moments[3], moments[:, 3], dense[:, 16:32] = 0, 0, 0
    for name in ("bfp4", "q40", "q41", "mxfp4", "nvfp4"):
        format_ = get_format(name)
        grid = grid_of(format_)
        assert grid is not None
        values = format_.dequantise(gptq(dense, grid, factorize(moments, format_.block)))
        assert bool(values.isfinite().all())


def test_factorize_without_moments_raises() -> None:
    with pytest.raises(CompileError, match="second moments"):
        factorize(torch.zeros(16, 16), 16)


@pytest.mark.parametrize("name", ["q40", "q41", "q50"])
def test_gptq_fits_float_scales_to_the_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format_, moments, dense = get_format(name), correlated(64), weight(48, 64)
    grid, factors = grid_of(format_), factorize(correlated(64), format_.block)
    assert grid is not None

    def error() -> float:
        values = format_.dequantise(gptq(dense, grid, factors))
        return output_error(dense, values, moments)

    fitted = error()
    monkeypatch.setattr(methods, "_fit_scales", lambda codes, scales, *_: scales)
    assert fitted < 0.99 * error()
