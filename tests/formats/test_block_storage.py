"""How block formats lie in memory: flat storage and Tenstorrent's tiles."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.formats import FORMATS, BlockFloat, get_format
from tilewright.compiler.formats.block_float import BlockEncoded
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


def values_of_tiles(block: BlockFloat, data: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """float32 ``shape`` from the tiles that ``pack_tiles`` wrote."""
    tile_rows, tile_columns = -(-shape[0] // 32), -(-shape[1] // 32)
    tiles = data.reshape(tile_rows * tile_columns, -1)
    exponents = tiles[:, :64].reshape(tile_rows, tile_columns, 2, 2, 16)
    exponents = exponents.permute(0, 2, 4, 1, 3).reshape(tile_rows * 32, -1)
    faces = block._mantissas(block._split(tiles[:, 64:].reshape(-1)))
    faces = faces.view(tile_rows, tile_columns, 2, 2, 16, 16).permute(0, 2, 4, 1, 3, 5)
    mantissas = faces.reshape(tile_rows * 32, tile_columns * 32)
    encoded = BlockEncoded(exponents=exponents, mantissas=mantissas, axis=-1)
    return block.dequantise(encoded)[: shape[0], : shape[1]]


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (33, 17), (1, 1)])
def test_tiles_round_trip(name: str, shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    data = block_format(name).pack_tiles(x)
    assert data.numel() == block_format(name).tile_nbytes(*shape)
    values = values_of_tiles(block_format(name), data, shape)
    assert torch.equal(values, FORMATS[name].round_trip(x))


def test_tile_bytes_per_element() -> None:
    assert [block_format(name).tile_nbytes(32, 32) for name in BLOCK_FORMATS] == [1088, 576, 320]
    assert block_format("bfp8").tile_nbytes(33, 64) == 4 * 1088


def test_where_each_element_of_a_tile_lies() -> None:
    bfp8 = block_format("bfp8")
    for row, column in ((0, 0), (0, 17), (5, 3), (16, 2), (31, 31)):
        x = torch.zeros(32, 64)
        x[row, column + 32] = -2.0
        data = bfp8.pack_tiles(x)
        assert not data[:1088].any()
        face = 2 * (row // 16) + column // 16
        tile = data[1088:]
        exponent_at = face * 16 + row % 16
        element_at = 64 + face * 256 + row % 16 * 16 + column % 16
        assert tile.nonzero().flatten().tolist() == [exponent_at, element_at]
        assert (tile[exponent_at].item(), tile[element_at].item()) == (128, 0x80 | 64)


def test_bfp4_tile_has_the_first_element_in_the_low_nibble() -> None:
    x = torch.zeros(32, 32)
    x[0, 0], x[0, 1] = 1.0, -1.0
    tile = block_format("bfp4").pack_tiles(x)
    assert (tile[0].item(), tile[64].item()) == (127, 0xC4)


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match="unknown format 'bfp3'; allowed: fp32, bf16, fp16, bfp8"):
        get_format("bfp3")
