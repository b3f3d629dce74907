"""NVFP4 scales: bytes and second scales give the file's float32 scales."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.formats import NVFP4
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.weights.coded import _of_encoded, pack_coded, unpack_coded
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES, CodedRows, tile_rows
from tilewright.compiler.targets.cuda.weights.packing_nvfp4 import scales_of, split_scales
from tilewright.errors import CheckpointError


def coded(scales: torch.Tensor) -> CodedRows:
    codes = torch.randint(0, 16, (len(scales), 16 * scales.shape[1]), dtype=torch.uint8)
    return CodedRows(codes, scales)


def signed(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return magnitude codes with their scales' signs, as ``codes * scales`` has."""
    magnitudes, signs = codes & 7, 1 - (codes >> 3).float() * 2
    return magnitudes * signs * scales.repeat_interleave(16, 1)


@given(
    second=st.floats(2.0**-90, 2.0**90, width=32),
    divides=st.booleans(),
    largest=st.integers(0, 126),
    seed=st.integers(0, 2**20),
)
def test_all_e4m3_scales_are_exact(second: float, divides: bool, largest: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randint(0, largest + 1, (3, 20), generator=generator, dtype=torch.uint8)
    stored |= torch.randint(0, 2, (3, 20), generator=generator, dtype=torch.uint8) << 7
    values, factor = stored.view(torch.float8_e4m3fn).float(), torch.tensor(second)
    scales = values / factor if divides else values * factor
    before = coded(scales)
    after = split_scales(before)
    assert after.second_scales is not None
    rounded = scales_of(after.scales, after.second_scales)
    assert torch.equal(signed(after.codes, rounded), signed(before.codes, scales))
    assert torch.equal(rounded[scales != 0], scales.abs()[scales != 0])


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("low_bits", [0, 4, None])
def test_second_scales_of_rows_are_exact(divides: bool, low_bits: int | None) -> None:
    """All e4m3 magnitudes, with another second scale in each row.

    With the low bits 4, several products are in the middle of two float32 numbers.
    """
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0x0D800000, 0x71800000, (4000, 1), generator=generator, dtype=torch.int32)
    if low_bits is not None:
        bits = bits & ~7 | low_bits
    seconds = bits.view(torch.float32)
    magnitudes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scales = magnitudes / seconds if divides else magnitudes * seconds
    after = split_scales(coded(scales))
    assert after.second_scales is not None
    rounded = scales_of(after.scales, after.second_scales)
    assert torch.equal(rounded[:, 1:], scales[:, 1:])
    assert not bool((after.codes[:, :16] & 7).any())  # the scale 0


def test_rows_with_a_single_scale_are_exact() -> None:
    stored = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = (stored.float() / 18561.7).unsqueeze(-1).expand(-1, 20).contiguous()
    after = split_scales(coded(scales))
    assert after.second_scales is not None
    assert torch.equal(scales_of(after.scales, after.second_scales)[1:], scales[1:])


@pytest.mark.parametrize("changed", [1.01, 2.0**-40])
def test_other_scales_are_refused(changed: float) -> None:
    scales = torch.ones(2, 4)
    scales[1, 2] = changed
    with pytest.raises(CheckpointError, match=r"nvfp4: .* common factor.*; allowed: e4m3 scales"):
        split_scales(coded(scales))


def test_quantized_rows_are_exact() -> None:
    """On a GPU all rows are quantized as a single row."""
    dense = torch.randn(16, 96) * torch.exp2(torch.randint(-9, 9, (16, 1)).float())
    dense[3, 16:48], dense[5] = 0, 0
    recipe = WeightRecipe((Segment("w", 16),), (16, 96), "nvfp4")
    packed = pack_coded(recipe, lambda name: dense, torch.device("cpu"), paired=False)
    assert torch.equal(unpack_coded(packed), NVFP4.round_trip(dense))
    flat = _of_encoded(NVFP4.quantise(dense.view(1, -1)), 16, "nvfp4")
    assert torch.equal(tile_rows(flat, CODED_TILES["nvfp4"]), packed.data)
    dense[2, 32:48] = 2.0**-60
    with pytest.raises(CheckpointError, match=r"w: nvfp4: scales .* 30 octaves apart; allowed: "):
        pack_coded(recipe, lambda name: dense, torch.device("cpu"), paired=False)
