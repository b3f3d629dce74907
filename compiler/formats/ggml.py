"""q40 and q80: ggml's Q4_0 and Q8_0 as formats, to the bit, and their bytes in a file.

value = (code - zero point) * scale, one float16 scale per 32 elements. Checked against the gguf
package; the arithmetic is ggml_codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.compiler.errors import CompileError
from tilewright.compiler.formats.base import DataFormat, Encoded, ScaledEncoded

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class GgmlFormat(DataFormat):
    """A ggml block format; ``zero_point`` is the code of 0 (Q4_0: unsigned, 8; Q8_0: signed, 0).

    A block whose scale exceeds float16, or that holds inf or NaN, is never finite: its values come
    back as inf or NaN, as ggml's do. A scale of 2**-25 or less rounds to 0, and its block with it.
    """

    zero_point: int = 0

    @property
    def code_dtype(self) -> torch.dtype:
        """The torch dtype of the codes: uint8 where they have a zero point, else int8."""
        import torch

        return torch.uint8 if self.zero_point else torch.int8

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> ScaledEncoded:
        """Encode as ggml does, blocks of 32 along ``axis`` (the last one is zero-padded)."""
        from tilewright.compiler.formats import ggml_codec
        from tilewright.compiler.formats.rows import as_rows

        moved = x.movedim(axis, -1)
        encoder = ggml_codec.encode_q40 if self.element_bits == 4 else ggml_codec.encode_q80
        codes, scales = ggml_codec.encode_rows(as_rows(moved), encoder, self.code_dtype)
        return ScaledEncoded(
            codes=codes.view(moved.shape),
            scales=scales.view(*moved.shape[:-1], scales.shape[-1]),
            axis=axis,
        )

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """float32 in the original axis order, as ``gguf`` dequantises the same bytes."""
        from tilewright.compiler.formats import ggml_codec
        from tilewright.compiler.formats.rows import as_rows

        assert isinstance(encoded, ScaledEncoded), f"{self.name} is encoded with scales"
        codes = encoded.codes
        values = ggml_codec.decode_rows(as_rows(codes), as_rows(encoded.scales), self.zero_point)
        return values.view(codes.shape).movedim(-1, encoded.axis)

    def scales(self, encoded: ScaledEncoded) -> torch.Tensor:
        """float32 ``[..., ceil(K/32)]`` such that value = (code - zero point) * scale.

        Raises:
            CompileError: where a scale is inf or NaN, which a product cannot use.
        """
        scales = encoded.scales.float()
        if not bool(scales.isfinite().all()):
            raise CompileError(
                f"{self.name}: the scale of a block is inf or NaN; allowed: scales up to 65504"
            )
        return scales

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """ggml's bytes, block after block along ``axis``: a float16 scale, then 32 codes.

        Q4_0 has code j in the low nibble of byte j, and code j + 16 in the high one.
        """
        import torch

        from tilewright.compiler.formats.rows import as_rows

        encoded = self.quantise(x, axis=axis)
        missing = -encoded.codes.shape[-1] % BLOCK_SIZE
        codes = torch.nn.functional.pad(encoded.codes, (0, missing), value=self.zero_point)
        blocks = codes.reshape(-1, BLOCK_SIZE)
        if self.element_bits == 4:
            blocks = blocks[:, :16] | blocks[:, 16:] << 4
        scales = as_rows(encoded.scales).reshape(-1, 1).view(torch.uint8)
        return torch.cat([scales, blocks.view(torch.uint8)], dim=1).reshape(-1)

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """The inverse of :meth:`pack`, as float32; refuses data of another size."""
        import torch

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = torch.empty(tuple(shape), device="meta").movedim(axis, -1).shape
        num_blocks = -(-moved[-1] // BLOCK_SIZE)
        blocks = data.reshape(-1, self.nbytes((BLOCK_SIZE,)))
        codes = blocks[:, 2:]
        if self.element_bits == 4:
            codes = torch.cat([codes & 0xF, codes >> 4], dim=1)
        codes = codes.contiguous().view(self.code_dtype)
        encoded = ScaledEncoded(
            codes=codes.view(*moved[:-1], num_blocks * BLOCK_SIZE)[..., : moved[-1]],
            scales=blocks[:, :2].contiguous().view(torch.float16).view(*moved[:-1], num_blocks),
            axis=axis,
        )
        return self.dequantise(encoded)


Q40 = GgmlFormat("q40", 4, BLOCK_SIZE, shared_bits=16, zero_point=8)
Q80 = GgmlFormat("q80", 8, BLOCK_SIZE, shared_bits=16)
