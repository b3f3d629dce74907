"""ggml's block formats with exact bits and file bytes: q40 is Q4_0, q4_k is Q4_K.

Blocks with 32 values (q40, q41, q50, q51, q80) have a float16 scale. q41 and q51 also have a
float16 minimum. The value is ``(code - zero point) * scale + minimum``. Blocks with 256 values
(q4_k, q5_k, q6_k, iq4_xs) are only read. The codes of iq4_xs are indices of 16 values. Tests
compare with the gguf package. The arithmetic is in ggml_codec and ggml_blocks.
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
    """A ggml format with blocks of 32 values.

    A block with inf or NaN, or with a scale too large for float16, decodes to inf or NaN as in
    ggml. A scale up to 2**-25 rounds to 0, and the block becomes 0.

    Attributes:
        zero_point: The code for 0, or for the minimum if ``has_minimums``. Q4_0: 8. Q8_0: 0.
        has_minimums: A block also has a float16 minimum.
    """

    zero_point: int = 0
    has_minimums: bool = False

    @property
    def code_dtype(self) -> torch.dtype:
        """Return the torch dtype for codes: int8 for 8-bit codes, else uint8."""
        import torch

        return torch.int8 if self.element_bits == 8 else torch.uint8

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> ScaledEncoded:
        """Encode as ggml does, in blocks along ``axis``. Zeros pad the last block."""
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
        """Return float32 values in the original axis order, equal to gguf's values."""
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
        """Return the float32 scales ``[..., ceil(K/32)]``.

        Raises:
            CompileError: A scale is inf or NaN. A matmul cannot use it.
        """
        scales = encoded.scales.float()
        if not bool(scales.isfinite().all()):
            raise CompileError(
                f"{self.name}: the scale of a block is inf or NaN; allowed: scales up to 65504"
            )
        return scales

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> torch.Tensor:
        """Return ggml's bytes, block after block along ``axis``.

        A block has a float16 scale, a float16 minimum if the format has minimums, the fifth bits of
        5-bit codes (code i in bit i), and the codes. Byte j has 4-bit code j in the low nibble and
        code j + 16 in the high nibble.
        """
        from tilewright.compiler.formats.rows import pad_blocks

        return self.pack_encoded(self.quantise(pad_blocks(x.movedim(axis, -1), BLOCK_SIZE)))

    def pack_encoded(self, encoded: ScaledEncoded) -> torch.Tensor:
        """Return packed bytes for codes with whole blocks along the last axis."""
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
        """Return the codes and scales in packed bytes.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
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
        """Return the float32 values of packed bytes.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
        return self.dequantise(self.read(data, shape, axis=axis))


@dataclass(frozen=True, slots=True)
class GgmlFileFormat(DataFormat):
    """A ggml format with blocks of 256 values. Its bytes are read and never written.

    A block has eight or sixteen groups. A group's scale is a small integer times the block's
    factor.
    """

    @property
    def is_offered(self) -> bool:
        """Return False: only a file can select this format."""
        return False

    def read(self, data: torch.Tensor) -> SuperBlocks:
        """Return the fields in rows of whole blocks, uint8 ``[rows, bytes]``.

        Raises:
            CompileError: A block's factor is inf or NaN. A matmul cannot use it.
        """
        from tilewright.compiler.formats.ggml_blocks import super_blocks

        found = super_blocks(data.cpu().numpy(), STORED_NAMES[self.name])
        if not bool(found.factors.isfinite().all()):
            raise CompileError(
                f"{self.name}: the scale of a block is inf or NaN; allowed: scales up to 65504"
            )
        return found

    def unpack(self, data: torch.Tensor, shape: Sequence[int], *, axis: int = -1) -> torch.Tensor:
        """Return the float32 values of file bytes, equal to gguf's values.

        Raises:
            CheckpointError: The data size does not match ``shape``.
        """
        from tilewright.compiler.formats.ggml_blocks import dequantise

        self.check_nbytes(data.numel(), self.nbytes(shape, axis=axis), shape)
        moved = _moved(shape, axis)
        num_blocks = -(-moved[-1] // SUPER_BLOCK_SIZE)
        values = dequantise(data.cpu().numpy(), STORED_NAMES[self.name]).to(data.device)
        rows = values.view(*moved[:-1], num_blocks * SUPER_BLOCK_SIZE)[..., : moved[-1]]
        return rows.movedim(-1, axis)

    def quantise(self, x: torch.Tensor, *, axis: int = -1) -> NoReturn:
        """Raise ConfigError: these formats are never written."""
        self._refuse()

    def dequantise(self, encoded: Encoded) -> NoReturn:
        """Raise ConfigError: :meth:`unpack` reads file bytes."""
        self._refuse()

    def pack(self, x: torch.Tensor, *, axis: int = -1) -> NoReturn:
        """Raise ConfigError: these formats are never written."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            f"{self.name}: nothing is quantised to it; allowed: only from a file, with precision "
            "stored"
        )


def _moved(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return ``shape`` with ``axis`` last."""
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
IQ4_XS = GgmlFileFormat("iq4_xs", 4, SUPER_BLOCK_SIZE, shared_bits=64)

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
        "iq4_xs": "IQ4_XS",
        "fp8": "FP8",
        "nvfp4": "NVFP4 1x16",
        "nf4": "bitsandbytes nf4",
    }
)
"""Tensor type in a checkpoint (ggml's or safetensors' name), by format."""

# The smallest formats for n bit codes: with the zero point in the middle, and with any zero
# point.
_SIGNED = {1: "q40", 2: "q40", 3: "q40", 4: "q40", 5: "q50", 6: "q80", 7: "q80", 8: "q80"}
_WITH_ZEROS = {1: "q40", 2: "q40", 3: "q40", 4: "q50", 5: "q80", 6: "q80", 7: "q80"}
EXACT_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "Q3_K": "q6_k",
        "IQ4_NL": "q80",
        "TQ1_0": "q40",
        "TQ2_0": "q40",
        "MXFP4": "bf16",
        "NVFP4": "bf16",
        **{
            f"{method} int{bits}{zeros}": name
            for method in ("AWQ", "GPTQ", "compressed-tensors", "torchao")
            for zeros, widest in (("", _SIGNED), (" with zeros", _WITH_ZEROS))
            for bits, name in widest.items()
        },
        **{
            f"FP8 {blocks}{scales}": "fp8"
            for blocks in ("128x128", "1x128", "per tensor", "per channel")
            for scales in ("", ", powers of two")
        },
        "FP8 1x32, powers of two": "bf16",
        **dict.fromkeys(("MLX int2", "MLX int3", "MLX int4"), "q41"),
        "MLX int5": "q51",
    }
)
"""Formats with all values of a checkpoint's tensor type, by type."""
