"""Block formats in flat storage, and the bytes of Tenstorrent's tiles."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.formats import FORMATS, BlockFloat, get_format
from tilewright.errors import CheckpointError, ConfigError

BLOCK_FORMATS = ("bfp8", "bfp4", "bfp2")


def block_format(name: str) -> BlockFloat:
    found = FORMATS[name]
    assert isinstance(found, BlockFloat)
    return found


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(
    "shape, axis", [((4, 48), -1), ((3, 20), -1), ((20, 3), 0), ((2, 5, 7), 1)]
)
def test_pack_and_unpack(name: str, shape: tuple[int, ...], axis: int) -> None:
    x = torch.randn(shape)
    packed = FORMATS[name].pack(x, axis=axis)
    assert packed.dtype == torch.uint8
    assert packed.numel() == FORMATS[name].nbytes(shape, axis=axis)
    values = FORMATS[name].unpack(packed, shape, axis=axis)
    assert torch.equal(values, FORMATS[name].round_trip(x, axis=axis))


@pytest.mark.parametrize("name", [*BLOCK_FORMATS, "fp32", "bf16"])
def test_unpack_refuses_another_size(name: str) -> None:
    packed = FORMATS[name].pack(torch.randn(2, 32))
    with pytest.raises(CheckpointError, match=rf"bytes of {name} for shape \[2, 32\]; allowed: "):
        FORMATS[name].unpack(packed[:-1], (2, 32))


def test_flat_bytes_by_hand() -> None:
    x = torch.tensor([[1.0, -0.5, 0.25] + [0.0] * 13])
    assert FORMATS["bfp8"].pack(x).tolist() == [127, 64, 0x80 | 32, 16] + [0] * 13
    # Two elements a byte, the first in the low half; the sign above three bits of magnitude.
    assert FORMATS["bfp4"].pack(x).tolist() == [127, (0x8 | 2) << 4 | 4, 1] + [0] * 6
    assert FORMATS["bfp2"].pack(x).tolist() == [127, 1] + [0] * 3


def test_tile_bytes_per_element() -> None:
    assert [block_format(name).tile_nbytes(32, 32) for name in BLOCK_FORMATS] == [1088, 576, 320]
    assert block_format("bfp8").tile_nbytes(33, 64) == 4 * 1088


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match="unknown format 'bfp3'; allowed: fp32, bf16, fp16, bfp8"):
        get_format("bfp3")
