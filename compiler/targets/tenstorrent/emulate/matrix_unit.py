"""Wormhole and Blackhole matmuls, bit for bit.

Defines settings, operands, K blocks and outputs. The sums are in ``matrix_unit_cpu.py`` and
``matrix_unit_cuda.py``. Excludes graphs and device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import FIDELITIES, BlockFloat, Fidelity, get_format
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.emulate.strided_weight import StridedWeight
from tilewright.errors import CompileError, allowed, one_line

OUT_FORMATS = ("fp32", "bf16", "bfp8", "bfp4")
PHASES = {"lofi": 1, "hifi2": 2, "hifi3": 3, "hifi4": 4}


@dataclass(frozen=True, slots=True)
class MatmulSettings:
    """Formats, fidelity, accumulation and K blocks of a matmul.

    Attributes:
        num_phases: Fidelity phase count, from 1 (LoFi) to 4 (HiFi4).
        fp32_dst: Dst is float32. False: bfloat16.
        l1_acc: The packer adds K blocks in L1.
        k_block: Elements of K in a block, a multiple of 32.
        out_format: An entry of `OUT_FORMATS`.
        sign_error: Emulate Wormhole's error: a sum of -1 unit in the last place of a float32 Dst is
            written 2**27 times too large.

    Raises:
        CompileError: The unit does not support a value.
    """

    num_phases: int
    fp32_dst: bool
    l1_acc: bool
    k_block: int
    out_format: str = "bf16"
    sign_error: bool = True

    def __post_init__(self) -> None:
        _check(self.num_phases in PHASES.values(), "phases", self.num_phases, PHASES.values())
        is_block = self.k_block > 0 and self.k_block % TILE == 0
        _check(is_block, "K block", self.k_block, (f"multiples of {TILE}",))
        _check(self.out_format in OUT_FORMATS, "output format", self.out_format, OUT_FORMATS)

    @classmethod
    def of(
        cls, fidelity: Fidelity | str, *, k_block: int, out_format: str, sign_error: bool = True
    ) -> MatmulSettings:
        """Return the settings of a fidelity or its name in
        `tilewright.compiler.formats.FIDELITIES`.
        """
        named = FIDELITIES[fidelity] if isinstance(fidelity, str) else fidelity
        return cls(
            num_phases=named.num_phases,
            fp32_dst=named.fp32_dest,
            l1_acc=named.packer_l1_acc,
            k_block=k_block,
            out_format="fp32" if named.fp32_outputs else out_format,
            sign_error=sign_error,
        )


def matmul(act: Tensor, weight: Tensor, settings: MatmulSettings) -> Tensor:
    """Return ``act @ weight`` as float32 ``[..., M, N]`` with values exact in the output format.

    K and N are padded with zeros. Block formats are exact in bfloat16. Rows are independent. As in
    the hardware, Inf and NaN operands are numbers with exponent 255.

    Args:
        act: bfloat16 ``[..., M, K]``.
        weight: bfloat16 ``[K, N]`` or ``[..., K, N]`` with any strides. Batch dimensions broadcast
            to the batch dimensions of ``act``. A transposed view is not copied.

    Raises:
        CompileError: Shapes, types or devices do not match.
    """
    _check_operands(act, weight)
    if weight.dim() == 2 and act.dim() > 2:
        return matmul(act.flatten(0, -2), weight, settings).unflatten(0, act.shape[:-1])
    batch, (num_rows, num_k) = act.shape[:-2], act.shape[-2:]
    act_BMK = act.reshape(batch.numel(), num_rows, num_k).contiguous()
    out = act.new_empty((act_BMK.shape[0], num_rows, weight.shape[-1]), dtype=torch.float32)
    if out.numel():
        _multiply(out, act_BMK, weight.expand(*batch, *weight.shape[-2:]), settings)
    return out.view(*batch, *out.shape[1:])


def _multiply(out: Tensor, act: Tensor, weight: Tensor, settings: MatmulSettings) -> None:
    """Sum all of K at once if the partial sums remain in Dst or L1, else block by block."""
    num_k = act.shape[-1]
    block, packs_partials = settings.k_block, False
    if not settings.l1_acc:
        # A bf16 Dst reloads partial sums in bf16 exactly, and an fp32 Dst reloads them in fp32
        # exactly.
        packs_partials = _is_block_format(settings.out_format) and not settings.fp32_dst
        block = settings.k_block if packs_partials else num_k
    if not packs_partials:
        _accumulate(out, act, weight, settings, block=block, reload=False)
        out.copy_(packed(out, settings.out_format))
        return
    for start in range(0, num_k, block):
        part = slice(start, start + block)
        slice_x = act[..., part].contiguous()
        _accumulate(out, slice_x, weight[..., part, :], settings, block=block, reload=start > 0)
        out.copy_(packed(out, settings.out_format))


def accumulator(device: torch.device) -> Callable[..., None]:
    """Return the function that sums on ``device``.

    Raises:
        CompileError: numba is not installed. The CPU needs it.
    """
    if device.type == "cuda":
        from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit_cuda import accumulate

        return accumulate
    try:
        from tilewright.compiler.targets.tenstorrent.emulate import matrix_unit_cpu
    except ImportError as error:
        raise CompileError(
            f"emulated boards: {one_line(error)}; allowed: pip install -e '.[boards]' in the clone"
        ) from None
    return matrix_unit_cpu.accumulate


def _accumulate(
    out: Tensor, act: Tensor, weight: Tensor, settings: MatmulSettings, *, block: int, reload: bool
) -> None:
    accumulate = accumulator(act.device)
    accumulate(
        out,
        act,
        _strided(weight),
        num_phases=settings.num_phases,
        fp32_dst=settings.fp32_dst,
        sign_error=settings.sign_error,
        block_tiles=max(1, block // TILE) if block < act.shape[-1] else -(-act.shape[-1] // TILE),
        reload=reload,
    )


def _strided(weight: Tensor) -> StridedWeight:
    """Return the storage of ``weight [..., K, N]`` without a copy."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(weight.shape[:-2], weight.stride()[:-2], strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    bits = weight.as_strided((last + 1,), (1,)).view(torch.int16)
    return StridedWeight(bits, offsets, weight.stride(-2), weight.stride(-1))


def packed(dst: Tensor, name: str) -> Tensor:
    """Return Dst after the packer: blocks along the last axis, bf16 with halves away from zero."""
    form = get_format(name)
    if isinstance(form, BlockFloat):
        return form.device_round_trip(dst)
    if name == "fp32":
        return dst
    return ((dst.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def _is_block_format(name: str) -> bool:
    return isinstance(get_format(name), BlockFloat)


def _check_operands(act: Tensor, weight: Tensor) -> None:
    for role, operand in (("act", act), ("weight", weight)):
        _check(operand.dtype == torch.bfloat16, f"type of {role}", operand.dtype, ("bfloat16",))
        _check(
            operand.dim() >= 2, f"shape of {role}", list(operand.shape), ("[..., rows, columns]",)
        )
    fits = act.shape[-1] == weight.shape[-2]
    if fits and weight.dim() > 2:
        batch = act.shape[:-2]
        fits = weight.dim() <= act.dim() and all(
            size in (1, of) for size, of in zip(weight.shape[-3::-1], batch[::-1], strict=False)
        )
    shapes = f"{list(act.shape)} x {list(weight.shape)}"
    _check(fits, "shapes", shapes, ("[..., M, K] x [K, N]", "[..., M, K] x [..., K, N]"))
    _check(act.device == weight.device, "devices", f"{act.device}, {weight.device}", ("one",))
    kind = act.device.type
    _check(kind in ("cpu", "cuda"), "device", kind, ("cpu", "cuda"))


def _check(is_allowed: bool, what: str, value: object, values: object) -> None:
    if not is_allowed:
        raise CompileError(f"matrix unit: {what} {value}; {allowed(values)}")  # type: ignore[arg-type]
