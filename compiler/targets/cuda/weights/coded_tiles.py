"""Tiles of small integer or float codes with scales, for weights on a GPU.

A tile has ``16`` rows and ``128`` columns. The code words come first, then the high bits, then
the scales. A scale array has all rows for a group in sequence. Excludes kernels and file bytes.

Rows have 16 words in sequence. With 8-bit codes, the words for the columns ``64 .. 127`` come after
all rows. Lanes that read 16 bytes in sequence have the columns ``32 p + 8 t .. 32 p + 8 t + 7``:
lane ``4 g + t`` has 8 columns from every block of 32.

4-bit words: word ``w`` has columns ``32 p + 2 w`` and ``32 p + 2 w + 1`` for
``p = 0 .. 3``. The first code is nibble ``p``, the second nibble ``p + 4``. For codebooks both are
in byte ``p``.
8-bit words: word ``w`` of half ``q`` has columns ``64 q + 32 p + 2 w`` and the next one for
``p`` 0 and 1, in bytes ``p`` and ``p + 2``.
Float words: the low half word has the first codes, the high half word the second. Magnitudes have
the bits ``6-8``, ``0-2``, ``10-12``, and ``4``, ``5``, ``14``. Signs are bits ``15``, ``9``, ``3``
in the other half word, and ``13``.
High bits: element ``w`` has the bits for columns ``32 p + 2 w + h`` from bit
``(p + 4 h) * high_bits``.
Float scales: byte ``p`` of word ``16 h + n`` is the scale of line ``n`` for group
``2 p + h``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor

from tilewright.compiler.formats.ggml_small_blocks import IQ4_VALUES
from tilewright.compiler.formats.scaled_codes import E2M1, NF4_VALUES

INTEGER, E4M3, CODEBOOK, FLOAT4 = "integer", "e4m3", "codebook", "float4"
ROWS, COLUMNS = 16, 128
_WORDS = 16


@dataclass(frozen=True, slots=True)
class CodedTile:
    """A tile layout.

    Attributes:
        low_bits: Bits per code in the words: 4 or 8.
        group: Columns per scale: 16, 32 or 128.
        scale: ``fp16``, ``fp32``, a small integer type with a factor: ``u8``, ``i8``, or ``e5m3``
            with second scales: ``(1 + m / 8) * 2 ** (e - 30)``.
        factor: Type for the factors. Empty: scales have none.
        high_bits: Additional bits per code.
        zero: The code for 0, or for the minimum.
        values: ``INTEGER``, ``E4M3``, ``FLOAT4``, or ``CODEBOOK`` for 16 free values.
        has_minimums: Whether a group also has a minimum, with its scale's types.
        subtracts: Whether the minimum is subtracted.
    """

    low_bits: int
    group: int
    scale: str
    factor: str = ""
    high_bits: int = 0
    zero: int = 0
    values: str = INTEGER
    has_minimums: bool = False
    subtracts: bool = False

    @property
    def num_groups(self) -> int:
        """Return the group count in a tile."""
        return COLUMNS // self.group

    @property
    def offsets(self) -> tuple[int, ...]:
        """Return the first bytes: high bits, scales, factors, minimums, their factors. The last
        value is the tile size.
        """
        shared = SIZES[self.scale] * self.num_groups
        factor = SIZES[self.factor] if self.factor else 0
        sizes = [
            COLUMNS * self.low_bits // 8,
            COLUMNS * self.high_bits // 8,
            shared,
            factor,
            shared if self.has_minimums else 0,
            factor if self.has_minimums else 0,
        ]
        result = [0]
        for size in sizes:
            result.append(result[-1] + ROWS * size)
        return tuple(result[1:])

    @property
    def num_bytes(self) -> int:
        """Return the tile size."""
        return self.offsets[-1]


SIZES = {"fp16": 2, "fp32": 4, "u8": 1, "i8": 1, "e5m3": 1}
_TYPES = {
    "fp16": torch.float16,
    "fp32": torch.float32,
    "u8": torch.uint8,
    "i8": torch.int8,
    "e5m3": torch.uint8,
}

CODED_TILES: Mapping[str, CodedTile] = MappingProxyType(
    {
        "q40": CodedTile(4, 32, "fp16", zero=8),
        "q41": CodedTile(4, 32, "fp16", has_minimums=True),
        "q50": CodedTile(4, 32, "fp16", high_bits=1, zero=16),
        "q51": CodedTile(4, 32, "fp16", high_bits=1, has_minimums=True),
        "q80": CodedTile(8, 32, "fp16"),
        "q4_k": CodedTile(4, 32, "u8", "fp16", has_minimums=True, subtracts=True),
        "q5_k": CodedTile(4, 32, "u8", "fp16", high_bits=1, has_minimums=True, subtracts=True),
        "q6_k": CodedTile(4, 16, "i8", "fp16", high_bits=2, zero=32),
        "iq4_xs": CodedTile(4, 32, "i8", "fp16", values=CODEBOOK),
        "fp8": CodedTile(8, 128, "fp32", values=E4M3),
        "nvfp4": CodedTile(4, 16, "e5m3", values=FLOAT4),
        "nf4": CodedTile(4, 64, "fp32", values=CODEBOOK),
    }
)
"""Layout by format."""


CODEBOOKS: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {"iq4_xs": tuple(map(float, IQ4_VALUES)), "nvfp4": E2M1, "nf4": NF4_VALUES}
)
"""Values of codes by format."""


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows of codes with their scales.

    Attributes:
        codes: uint8 ``[N, K]``; 8-bit codes keep their bits.
        scales: ``[N, ceil(K / group)]``.
        factors: ``[N, ceil(K / 128)]``. None: the tile has none.
        minimums: As ``scales``.
        minimum_factors: As ``factors``.
        second_scales: float64 ``[N]``, outside tiles. See `packing_nvfp4`.
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor | None = None
    minimums: Tensor | None = None
    minimum_factors: Tensor | None = None
    second_scales: Tensor | None = None


def tile_rows(rows: CodedRows, tile: CodedTile) -> Tensor:
    """Return uint8 ``[tiles, column tiles, bytes]``. The padding decodes to 0."""
    num_rows, num_columns = rows.codes.shape
    padded = num_rows + -num_rows % ROWS, num_columns + -num_columns % COLUMNS
    codes = _pad(rows.codes.view(torch.uint8), padded).view(-1, ROWS, padded[1] // COLUMNS, COLUMNS)
    codes = codes.transpose(1, 2).contiguous()
    shape = codes.shape[:2]
    parts = [_words(codes, tile), _high_bits(codes, tile)]
    for item, group, name in (
        (rows.scales, tile.group, tile.scale),
        (rows.factors, COLUMNS, tile.factor),
        (rows.minimums, tile.group, tile.scale),
        (rows.minimum_factors, COLUMNS, tile.factor),
    ):
        if item is not None:
            item = _pad(item.to(_TYPES[name]), (padded[0], padded[1] // group))
            item = item.view(shape[0], ROWS, shape[1], -1).permute(0, 2, 3, 1).contiguous()
            item = item.view(torch.uint8)
            parts.append(item.view(*shape, 4, 32).mT if name == "e5m3" else item)
    data = torch.cat([item.reshape(*shape, -1) for item in parts], dim=-1)
    assert data.shape[-1] == tile.num_bytes
    return data


def untile_rows(data: Tensor, tile: CodedTile) -> CodedRows:
    """Return the padded rows."""
    bounds = (0, *tile.offsets)
    pieces = [data[..., first:last] for first, last in pairwise(bounds)]
    codes = _low_codes(pieces[0], tile) | _high_codes(pieces[1], tile)
    num_rows, num_columns = data.shape[0] * ROWS, data.shape[1] * COLUMNS
    codes = codes.transpose(1, 2).reshape(num_rows, num_columns)

    def shared(piece: Tensor, name: str) -> Tensor | None:
        if not piece.shape[-1]:
            return None
        if name == "e5m3":
            piece = piece.reshape(*data.shape[:2], 32, 4).mT
        result = piece.contiguous().view(_TYPES[name]).view(*data.shape[:2], -1, ROWS)
        return result.permute(0, 3, 1, 2).reshape(num_rows, -1)

    names = tile.scale, tile.factor, tile.scale, tile.factor
    result = [shared(piece, name) for piece, name in zip(pieces[2:], names, strict=True)]
    assert result[0] is not None
    return CodedRows(codes, result[0], *result[1:])


def _pad(rows: Tensor, shape: tuple[int, int]) -> Tensor:
    missing = shape[1] - rows.shape[1], shape[0] - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, missing[0], 0, missing[1])).contiguous()


def _words(codes: Tensor, tile: CodedTile) -> Tensor:
    """Return word bytes for codes ``[..., 16, 128]``."""
    if tile.low_bits == 8:  # [n, q, p, w, h] to [q, n, w, h, p]
        parts = codes.view(*codes.shape[:-1], 2, 2, _WORDS, 2)
        return parts.permute(0, 1, 3, 2, 5, 6, 4).flatten(2)
    parts = (codes & 0xF).view(*codes.shape[:-1], 4, _WORDS, 2)
    if tile.values == FLOAT4:
        return float4_halves(parts.movedim(-3, 0)).view(torch.uint8).flatten(-2)
    if tile.values == CODEBOOK:  # a byte has both codes of a pair
        return (parts[..., 0] | parts[..., 1] << 4).transpose(-1, -2).flatten(-2)
    parts = parts.permute(0, 1, 2, 4, 5, 3)  # [p, w, h] to [w, h, p]
    return (parts[..., 0::2] | parts[..., 1::2] << 4).flatten(-3)


def _low_codes(words: Tensor, tile: CodedTile) -> Tensor:
    """Return codes ``[..., 16, 128]`` from word bytes."""
    shape = *words.shape[:-1], ROWS
    if tile.low_bits == 8:
        parts = words.reshape(*words.shape[:-1], 2, ROWS, _WORDS, 2, 2)
        return parts.permute(0, 1, 3, 2, 6, 4, 5).reshape(*shape, COLUMNS)
    if tile.values == FLOAT4:
        halves = words.contiguous().view(torch.int16).reshape(*shape, _WORDS, 2)
        return codes_of_halves(halves).movedim(0, -3).reshape(*shape, COLUMNS)
    if tile.values == CODEBOOK:
        parts = words.reshape(*shape, _WORDS, 4).transpose(-1, -2)
        return torch.stack((parts & 0xF, parts >> 4), dim=-1).reshape(*shape, COLUMNS)
    parts = words.reshape(*shape, _WORDS, 2, 2)
    parts = torch.stack((parts & 0xF, parts >> 4), dim=-1).flatten(-2)
    return parts.permute(0, 1, 2, 5, 3, 4).reshape(*shape, COLUMNS)


def float4_halves(codes: Tensor) -> Tensor:
    """Return int16 half words ``[..., 2]`` for 4-bit float codes ``[4, ..., 2]``."""
    magnitudes, signs = codes.int() & 7, codes.int() >> 3
    halves = magnitudes[0] << 6 | signs[0] << 15 | magnitudes[1] | signs[1] << 9
    halves |= magnitudes[2] << 10 | signs[2].flip(-1) << 3
    halves |= (magnitudes[3] & 3) << 4 | magnitudes[3] >> 2 << 14 | signs[3] << 13
    return halves.to(torch.int16)


def codes_of_halves(halves: Tensor) -> Tensor:
    """Return the uint8 codes ``[4, ..., 2]`` of `float4_halves`."""
    halves = halves.int()
    codes = [halves >> 6 & 7 | halves >> 12 & 8, halves & 7 | halves >> 6 & 8]
    codes.append(halves >> 10 & 7 | halves.flip(-1) & 8)
    codes.append(halves >> 4 & 3 | halves >> 12 & 4 | halves >> 10 & 8)
    return torch.stack(codes).to(torch.uint8)


def _high_bits(codes: Tensor, tile: CodedTile) -> Tensor:
    """Return high-bit bytes for codes ``[..., 16, 128]``."""
    bits = tile.high_bits
    if not bits:
        return codes.new_empty((*codes.shape[:-1], 0))
    parts = (codes >> tile.low_bits).view(*codes.shape[:-1], 4, _WORDS, 2)
    parts = parts.permute(0, 1, 2, 4, 5, 3).flatten(-2).to(torch.int32)  # [w, 4 h + p]
    shifts = torch.arange(0, 8 * bits, bits, device=codes.device)
    whole = (parts << shifts).sum(-1).to(torch.int32)
    result = torch.stack([whole >> 8 * byte & 0xFF for byte in range(bits)], dim=-1)
    return result.to(torch.uint8).flatten(-2)


def _high_codes(high: Tensor, tile: CodedTile) -> Tensor:
    """Return what the high bits add to codes ``[..., 16, 128]``."""
    bits, shape = tile.high_bits, (*high.shape[:-1], ROWS)
    if not bits:
        return high.new_zeros((*shape, COLUMNS))
    parts = high.reshape(*shape, _WORDS, bits).to(torch.int32)
    whole = sum(parts[..., byte] << 8 * byte for byte in range(bits))
    assert isinstance(whole, Tensor)
    shifts = torch.arange(0, 8 * bits, bits, device=high.device)
    codes = (whole[..., None] >> shifts & (1 << bits) - 1) << tile.low_bits
    codes = codes.view(*shape, _WORDS, 2, 4).permute(0, 1, 2, 5, 3, 4)
    return codes.reshape(*shape, COLUMNS).to(torch.uint8)
