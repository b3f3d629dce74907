"""ggml's block formats, to the bit, and their bytes in a file: q40 is its Q4_0, q4_k its Q4_K.

Of blocks of 32 (q40, q41, q50, q51, q80) value = (code - zero point) * scale + minimum, with one
float16 scale, and a float16 minimum in q41 and q51. Those of 256 (q4_k, q5_k, q6_k) are only read.
Checked against the gguf package; the arithmetic is ggml_codec and ggml_blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

from tilewright.compiler.formats.base import DataFormat, Encoded, ScaledEncoded
from tilewright.errors import CompileError, ConfigError

if TYPE_CHECKING:
    import torch

    from tilewright.compiler.formats.ggml_blocks import SuperBlocks

BLOCK_SIZE = 32
SUPER_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class GgmlFormat(DataFormat):
    """A ggml format of blocks of 32; ``zero_point`` is the code of 0 (Q4_0: unsigned, 8; Q8_0:
    signed, 0), or of the minimum where it ``has_minimums``.

    A block whose scale exceeds float16, or that holds inf or NaN, is never finite: its values come
    back as inf or NaN, as ggml's do. A scale of 2**-25 or less rounds to 0, and its block with it.
    """

    zero_point: int = 0
    has_minimums: bool = False

    @property
    def code_dtype(self) -> torch.dtype:
        """The torch dtype of the codes: int8 of 8 bits, else uint8."""
        import torch

        return torch.int8 if self.element_bits == 8 else torch.uint8

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> ScaledEncoded:
        """Encode as ggml does, blocks of 32 along ``axis`` (the last one is zero-padded)."""
        from tilewright.compiler.formats import ggml_codec
        from tilewright.compiler.formats.rows import as_rows

        moved = x.movedim(axis, -1)
        codes, scales, minimums = ggml_codec.encode_rows(
            as_rows(moved),
            ggml_codec.ENCODERS[self.name],
            self.code_dtype,
            has_minimums=self.has_minimums,
        )
        blocks = *moved.shape[:-1], scales.shape[-1]
        return ScaledEncoded(
            codes=codes.view(moved.shape),
            scales=scales.view(blocks),
            axis=axis,
            minimums=None if minimums is None else minimums.view(blocks),
        )

    def dequantise(self, encoded: Encoded) -> torch.Tensor:
        """float32 in the original axis order, as ``gguf`` dequantises the same bytes."""
        from tilewright.compiler.formats import ggml_codec
        from tilewright.compiler.formats.rows import as_rows

        assert isinstance(encoded, ScaledEncoded), f"{self.name} is encoded with scales"
        codes, minimums = encoded.codes, encoded.minimums
        values = ggml_codec.decode_rows(
            as_rows(codes),
            as_rows(encoded.scales),
            None if minimums is None else as_rows(minimums),
            self.zero_point,
        )
        return values.view(codes.shape).movedim(-1, encoded.axis)

    def scales(self, encoded: ScaledEncoded) -> torch.Tensor:
        """float32 ``[..., ceil(K/32)]`` such that value = (code - zero point) * scale + minimum.

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
        """ggml's bytes, block after block along ``axis``: a float16 scale, the float16 minimum of
        those that have one, the fifth bits of 5-bit codes (code i in bit i), then the codes.

        Codes of 4 and 5 bits have code j in the low nibble of byte j, and code j + 16 in the high.
        """
        from tilewright.compiler.formats.rows import pad_blocks

        return self.pack_encoded(self.quantise(pad_blocks(x.movedim(axis, -1), BLOCK_SIZE)))

    def pack_encoded(self, encoded: ScaledEncoded) -> torch.Tensor:
        """Return the bytes of :meth:`pack` for codes with whole blocks along the last axis."""
        import torch

        blocks = encoded.codes.reshape(-1, BLOCK_SIZE)
        shared = (encoded.scales, encoded.minimums)
        parts = [each.reshape(-1, 1).view(torch.uint8) for each in shared if each is not None]
        if self.element_bits == 5:
            bits = (blocks >> 4).view(-1, 4, 8) << torch.arange(8, device=blocks.device)
            parts.append(bits.sum(-1).to(torch.uint8))
        if self.element_bits < 8:
            blocks = blocks & 0xF
            blocks = blocks[:, :16] | blocks[:, 16:] << 4
        return torch.cat([*parts, blocks.view(torch.uint8)], dim=1).reshape(-1)

    def read(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> ScaledEncoded:
        """What the bytes that :meth:`pack` writes encode; refuses data of another size."""
        import torch

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = _moved(shape, axis)
        num_blocks = -(-moved[-1] // BLOCK_SIZE)
        blocks = data.reshape(-1, self.nbytes((BLOCK_SIZE,)))
        at = 4 if self.has_minimums else 2
        codes = blocks[:, at + 4 if self.element_bits == 5 else at :]
        if self.element_bits < 8:
            codes = torch.cat([codes & 0xF, codes >> 4], dim=1)
        if self.element_bits == 5:
            bits = blocks[:, at : at + 4, None] >> torch.arange(8, device=data.device) & 1
            codes = codes | (bits.view(-1, BLOCK_SIZE) << 4).to(torch.uint8)
        codes = codes.contiguous().view(self.code_dtype)
        shared = blocks[:, :at].contiguous().view(torch.float16)
        shared = shared.view(*moved[:-1], num_blocks, at // 2)
        return ScaledEncoded(
            codes=codes.view(*moved[:-1], num_blocks * BLOCK_SIZE)[..., : moved[-1]],
            scales=shared[..., 0],
            axis=axis,
            minimums=shared[..., 1] if self.has_minimums else None,
        )

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """The inverse of :meth:`pack`, as float32; refuses data of another size."""
        return self.dequantise(self.read(data, shape, axis=axis))


@dataclass(frozen=True, slots=True)
class GgmlFileFormat(DataFormat):
    """A ggml format of blocks of 256 (its K-quants), whose bytes are read and never made.

    Eight or sixteen groups of a block have a scale each, small integers times the block's own.
    """

    @property
    def is_offered(self) -> bool:
        """Always False: weights of this format come from a file, and nobody may ask for it."""
        return False

    def read(self, data: torch.Tensor) -> SuperBlocks:
        """The parts of rows of whole blocks, uint8 ``[rows, bytes]``.

        Raises:
            CompileError: where a block's factor is inf or NaN, which a product cannot use.
        """
        from tilewright.compiler.formats.ggml_blocks import super_blocks

        found = super_blocks(data.cpu().numpy(), STORED_NAMES[self.name])
        if not bool(found.factors.isfinite().all()):
            raise CompileError(
                f"{self.name}: the scale of a block is inf or NaN; allowed: scales up to 65504"
            )
        return found

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """The float32 values of a file's bytes, as ``gguf`` has them; refuses data of another
        size.
        """
        from tilewright.compiler.formats.ggml_blocks import dequantise

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = _moved(shape, axis)
        num_blocks = -(-moved[-1] // SUPER_BLOCK_SIZE)
        values = dequantise(data.cpu().numpy(), STORED_NAMES[self.name]).to(data.device)
        rows = values.view(*moved[:-1], num_blocks * SUPER_BLOCK_SIZE)[..., : moved[-1]]
        return rows.movedim(-1, axis)

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> NoReturn:
        """Always raise ConfigError: these formats are read and never made."""
        self._refuse()

    def dequantise(self, encoded: Encoded) -> NoReturn:
        """Always raise ConfigError: a file's bytes are read by :meth:`unpack`."""
        self._refuse()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> NoReturn:
        """Always raise ConfigError: these formats are read and never made."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"{self.name}: nothing is quantised to it; allowed: only from a file, with precision "
            "stored"
        )


def _moved(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """``shape`` with ``axis`` last."""
    axes = list(shape)
    axes.append(axes.pop(axis))
    return tuple(axes)


Q40 = GgmlFormat("q40", 4, BLOCK_SIZE, shared_bits=16, zero_point=8)
Q41 = GgmlFormat("q41", 4, BLOCK_SIZE, shared_bits=32, has_minimums=True)
Q50 = GgmlFormat("q50", 5, BLOCK_SIZE, shared_bits=16, zero_point=16)
Q51 = GgmlFormat("q51", 5, BLOCK_SIZE, shared_bits=32, has_minimums=True)
Q80 = GgmlFormat("q80", 8, BLOCK_SIZE, shared_bits=16)
Q4_K = GgmlFileFormat("q4_k", 4, SUPER_BLOCK_SIZE, shared_bits=128)
Q5_K = GgmlFileFormat("q5_k", 5, SUPER_BLOCK_SIZE, shared_bits=128)
Q6_K = GgmlFileFormat("q6_k", 6, SUPER_BLOCK_SIZE, shared_bits=144)

STORED_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "fp32": "F32",
        "fp16": "F16",
        "bf16": "BF16",
        "q40": "Q4_0",
        "q41": "Q4_1",
        "q50": "Q5_0",
        "q51": "Q5_1",
        "q80": "Q8_0",
        "q4_k": "Q4_K",
        "q5_k": "Q5_K",
        "q6_k": "Q6_K",
    }
)
"""What checkpoints call the formats that their tensors are stored in: ggml's and safetensors'."""

# The smallest blocks with all codes of so many bits, around the middle or around any zero.
_SIGNED = {1: "q40", 2: "q40", 3: "q40", 4: "q40", 5: "q50", 6: "q80", 7: "q80", 8: "q80"}
_WITH_ZEROS = {1: "q40", 2: "q40", 3: "q40", 4: "q50", 5: "q80", 6: "q80", 7: "q80"}
_POWERS = "powers of two"
EXACT_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "Q3_K": "q6_k",
        "IQ4_NL": "q80",
        "TQ1_0": "q40",
        "TQ2_0": "q40",
        "MXFP4": "bf16",
        **{
            f"{method} int{bits}{zeros}": name
            for method in ("AWQ", "GPTQ", "compressed-tensors")
            for zeros, widest in (("", _SIGNED), (" with zeros", _WITH_ZEROS))
            for bits, name in widest.items()
        },
        **{
            f"FP8 {kind}, {_POWERS}": "bf16"
            for kind in ("128x128", "per tensor", "per channel", "1x32")
        },
    }
)
"""Formats that hold every value of a checkpoint's type exactly, by the type."""
