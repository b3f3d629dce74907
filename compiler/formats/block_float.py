"""The block formats bfp8, bfp4 and bfp2 of Tenstorrent, and their tile layout.

The value is ``sign * M * 2 ** (E - 127 - (m - 1))``. Blocks share an exponent E. The magnitude M
has m bits and no hidden bit. Tests compare all bits with the host conversion of ttnn. The
arithmetic is in block_codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.formats.base import BlockEncoded, DataFormat, Encoded
from tilewright.errors import CompileError

if TYPE_CHECKING:
    import torch

    from tilewright.compiler.formats.block_codec import RowEncoder

BLOCK_SIZE = 16
TILE = 32


@dataclass(frozen=True, slots=True)
class BlockFloat(DataFormat):
    """A block format. An element has a sign and ``mantissa_bits`` magnitude bits."""

    @property
    def mantissa_bits(self) -> int:
        """Return the magnitude bit count, without the sign."""
        return self.element_bits - 1

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> BlockEncoded:
        """Encode with the host's rounding, in blocks along ``axis``. Zeros pad the last block.

        A block with inf or NaN gets exponent 255. bfp2 does not distinguish NaN from inf.
        """
        from tilewright.compiler.formats import block_codec
        from tilewright.compiler.formats.rows import as_rows

        moved = x.movedim(axis, -1)
        exponents, mantissas = block_codec.map_rows(
            as_rows(moved), self.mantissa_bits, block_codec.encode_host
        )
        return BlockEncoded(
            exponents=exponents.view(*moved.shape[:-1], exponents.shape[-1]),
            mantissas=mantissas.view(moved.shape),
            axis=axis,
        )

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """Return float32 values in the original axis order. Finite values are exact in bf16."""
        from tilewright.compiler.formats import block_codec
        from tilewright.compiler.formats.rows import as_rows

        assert isinstance(encoded, BlockEncoded), f"{self.name} is encoded in blocks"
        mantissas = encoded.mantissas
        values = block_codec.decode_rows(
            as_rows(encoded.exponents), as_rows(mantissas), self.mantissa_bits
        )
        return values.view(mantissas.shape).movedim(-1, encoded.axis)

    def round_trip(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Return ``dequantise(quantise(x))``, contiguous, without memory for the whole encoded
        tensor.
        """
        from tilewright.compiler.formats import block_codec

        return self._round_trip(x, axis, block_codec.encode_host)

    def device_round_trip(self, x: torch.Tensor) -> torch.Tensor:
        """Encode and decode with the rounding of a Wormhole packer, as for kernel outputs."""
        from tilewright.compiler.formats import block_codec

        return self._round_trip(x, -1, block_codec.encode_device)

    def cast_round_trip(self, x: torch.Tensor) -> torch.Tensor:
        """Encode and decode with the rounding of a cast on a board, which has a single step."""
        from tilewright.compiler.formats import block_codec

        return self._round_trip(x, -1, block_codec.encode_cast)

    def _round_trip(self, x: torch.Tensor, axis: int, encoder: RowEncoder) -> torch.Tensor:
        from tilewright.compiler.formats import block_codec
        from tilewright.compiler.formats.rows import as_rows

        moved = x.movedim(axis, -1)
        values = block_codec.round_trip_rows(as_rows(moved), self.mantissa_bits, encoder)
        return values.view(moved.shape).movedim(-1, axis).contiguous()

    def scales(self, encoded: BlockEncoded) -> torch.Tensor:
        """Return float32 scales ``[..., ceil(K/16)]``. A value is exactly mantissa * scale.

        Raises:
            CompileError: A block contains inf or NaN.
        """
        import torch

        if bool((encoded.exponents == 255).any()):
            raise CompileError(f"{self.name}: a block holds inf or NaN; allowed: finite values")
        power = encoded.exponents.double() - (127 + self.mantissa_bits - 1)
        return torch.exp2(power).float()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Return all exponents, then all element codes, in order along ``axis``."""
        import torch

        encoded = self.quantise(x, axis=axis)
        return torch.cat([encoded.exponents.reshape(-1), self.pack_codes(encoded.mantissas)])

    def pack_codes(self, mantissas: torch.Tensor) -> torch.Tensor:
        """Return the mantissa bytes, flat. Rows are padded to whole blocks."""
        return self._join(self._codes(mantissas).reshape(-1))

    def unpack_codes(self, data: torch.Tensor) -> torch.Tensor:
        """Return the mantissas of :meth:`pack_codes`, flat, with the padding."""
        return self._mantissas(self._split(data))

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """Return float32 values from packed bytes.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
        import torch

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = torch.empty(tuple(shape), device="meta").movedim(axis, -1).shape
        num_blocks = -(-moved[-1] // BLOCK_SIZE)
        num_exponents = moved[:-1].numel() * num_blocks
        flat = data.reshape(-1)
        mantissas = self.unpack_codes(flat[num_exponents:])
        encoded = BlockEncoded(
            exponents=flat[:num_exponents].view(*moved[:-1], num_blocks),
            mantissas=mantissas.view(*moved[:-1], -1)[..., : moved[-1]],
            axis=axis,
        )
        return self.dequantise(encoded)

    def tile_nbytes(self, num_rows: int, num_columns: int) -> int:
        """Return a matrix's bytes in tiles (bfp8: 1088 per tile, bfp4: 576)."""
        num_tiles = -(-num_rows // TILE) * -(-num_columns // TILE)
        return num_tiles * (64 + TILE * TILE * self.element_bits // 8)

    def _codes(self, mantissas: torch.Tensor) -> torch.Tensor:
        """Return a byte per element, in whole blocks, with the sign bit above the magnitude."""
        import torch

        from tilewright.compiler.formats.rows import pad_blocks

        padded = pad_blocks(mantissas, BLOCK_SIZE)
        sign = (padded < 0).to(torch.uint8) << self.mantissa_bits
        return padded.abs().to(torch.uint8) | sign

    def _mantissas(self, codes: torch.Tensor) -> torch.Tensor:
        import torch

        magnitudes = (codes & ((1 << self.mantissa_bits) - 1)).to(torch.int8)
        return torch.where(codes >> self.mantissa_bits == 1, -magnitudes, magnitudes)

    def _join(self, codes: torch.Tensor) -> torch.Tensor:
        """Combine several codes into a byte. The first code has the low bits."""
        per_byte = 8 // self.element_bits
        joined = codes[::per_byte].clone()
        for position in range(1, per_byte):
            joined |= codes[position::per_byte] << (position * self.element_bits)
        return joined

    def _split(self, data: torch.Tensor) -> torch.Tensor:
        import torch

        per_byte = 8 // self.element_bits
        mask = (1 << self.element_bits) - 1
        parts = [(data >> (i * self.element_bits)) & mask for i in range(per_byte)]
        return torch.stack(parts, dim=-1).reshape(-1)


BFP8 = BlockFloat("bfp8", 8, BLOCK_SIZE, shared_bits=8)
BFP4 = BlockFloat("bfp4", 4, BLOCK_SIZE, shared_bits=8)
BFP2 = BlockFloat("bfp2", 2, BLOCK_SIZE, shared_bits=8)
