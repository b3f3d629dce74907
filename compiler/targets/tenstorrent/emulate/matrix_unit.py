"""Matrix products as the matrix units of Wormhole and Blackhole make them, bit for bit.

What a product is: its settings, operands, K blocks and output. How its sums are formed stands in
matrix_unit_cpu and matrix_unit_cuda; this file knows no graph and no device's memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewright.compiler.formats import FIDELITIES, BlockFloat, Fidelity, get_format
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.emulate.strided_weight import StridedWeight
from tilewright.errors import CompileError, allowed, one_line

OUT_FORMATS = ("fp32", "bf16", "bfp8", "bfp4")
OPERAND_FORMATS = ("bf16", "bfp8", "bfp4", "bfp2")
PHASES = {"lofi": 1, "hifi2": 2, "hifi3": 3, "hifi4": 4}

_NAME = re.compile(
    r"(?P<act>\w+)\.(?P<weight>\w+)\.(?P<fidelity>\w+)\.fp32dst(?P<fp32_dst>[01])"
    r"\.l1acc(?P<l1_acc>[01])\.block(?P<k_block>\d+)\.out_(?P<out>\w+)"
)
_NAME_FORM = "<act>.<weight>.<fidelity>.fp32dst<0|1>.l1acc<0|1>.block<K block>.out_<format>"


@dataclass(frozen=True, slots=True)
class MatmulSettings:
    """How a product is computed: formats, fidelity, accumulation and blocks of K.

    ``num_phases`` fidelity phases (1 LoFi to 4 HiFi4); ``fp32_dst``: Dst is float32, not bfloat16;
    ``l1_acc``: the packer adds the K blocks in L1; ``k_block``: elements of K a block;
    ``out_format``: one of `OUT_FORMATS`. ``sign_error``: a sum of -1 in the last place of a float32
    Dst is written 2**27 times too large, as on Wormhole.

    Raises:
        CompileError: for a value that the unit does not have.
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
        """The settings behind a named fidelity (`tilewright.compiler.formats.FIDELITIES`)."""
        named = FIDELITIES[fidelity] if isinstance(fidelity, str) else fidelity
        return cls(
            num_phases=named.num_phases,
            fp32_dst=named.fp32_dest,
            l1_acc=named.packer_l1_acc,
            k_block=k_block,
            out_format="fp32" if named.fp32_outputs else out_format,
            sign_error=sign_error,
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """A product's settings and the formats that its operands are held in."""

    act_format: str
    weight_format: str
    matmul: MatmulSettings

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Read ``<act>.<weight>.<fidelity>.fp32dst<0|1>.l1acc<0|1>.block<K block>.out_<format>``.

        Raises:
            CompileError: for a name of another form, or a part that is not known.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise CompileError(f"setting {name!r}; {allowed([_NAME_FORM])}")
        part = match.groupdict()
        for role in ("act", "weight"):
            _check(part[role] in OPERAND_FORMATS, f"{role} format", part[role], OPERAND_FORMATS)
        _check(part["fidelity"] in PHASES, "fidelity", part["fidelity"], PHASES)
        settings = MatmulSettings(
            num_phases=PHASES[part["fidelity"]],
            fp32_dst=part["fp32_dst"] == "1",
            l1_acc=part["l1_acc"] == "1",
            k_block=int(part["k_block"]),
            out_format=part["out"],
        )
        return cls(part["act"], part["weight"], settings)


def run_setting(act_MK: Tensor, weight_KN: Tensor, name: str, *, sign_error: bool = True) -> Tensor:
    """float32 ``[M, N]``: pack both operands as a host does, blocks along the last axis, multiply.

    ``name`` is what `Setting.parse` reads; the operands are floating-point of any kind.
    ``sign_error``: False for Blackhole, see `MatmulSettings`.
    """
    setting = Setting.parse(name)
    act, weight = _rounded(act_MK, setting.act_format), _rounded(weight_KN, setting.weight_format)
    return matmul(act, weight, replace(setting.matmul, sign_error=sign_error))


def matmul(act: Tensor, weight: Tensor, settings: MatmulSettings) -> Tensor:
    """float32 ``[..., M, N]``, exact in the output format.

    ``act`` bfloat16 ``[..., M, K]``; ``weight`` bfloat16 ``[K, N]`` or ``[..., K, N]`` of any
    strides (a transposed view is read in place), its batch dimensions broadcast to those of
    ``act``. K and N of any size count as padded with zeros. Block formats are exact in bfloat16.
    Rows do not depend on each other. Inf and NaN operands count as numbers of exponent 255, as in
    the unit.

    Raises:
        CompileError: for shapes, types or devices that do not fit together.
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
    """All of K where the partial sums stay in Dst or L1, else a block at a time."""
    num_k = act.shape[-1]
    block, packs_partials = settings.k_block, False
    if not settings.l1_acc:
        # Partials of bf16 from a bf16 Dst, and of fp32 from a fp32 one, come back as they were.
        packs_partials = _is_block_format(settings.out_format) and not settings.fp32_dst
        block = settings.k_block if packs_partials else num_k
    if not packs_partials:
        _accumulate(out, act, weight, settings, block=block, reload=False)
        out.copy_(packed(out, settings.out_format))
        return
    for start in range(0, num_k, block):
        part = slice(start, start + block)
        held = act[..., part].contiguous()
        _accumulate(out, held, weight[..., part, :], settings, block=block, reload=start > 0)
        out.copy_(packed(out, settings.out_format))


def accumulator(device: torch.device) -> Callable[..., None]:
    """Return the function that sums on ``device``.

    Raises:
        CompileError: numba, which the CPU needs, is not installed.
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
    """The storage that ``weight [..., K, N]`` lies in, without a copy."""
    offsets = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(weight.shape[:-2], weight.stride()[:-2], strict=True):
        offsets = (offsets[:, None] + torch.arange(size) * stride).flatten()
    last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    bits = weight.as_strided((last + 1,), (1,)).view(torch.int16)
    return StridedWeight(bits, offsets, weight.stride(-2), weight.stride(-1))


def packed(dst: Tensor, name: str) -> Tensor:
    """What the packer makes of Dst: blocks along the last axis; bf16 with halves away from zero."""
    form = get_format(name)
    if isinstance(form, BlockFloat):
        return form.device_round_trip(dst)
    if name == "fp32":
        return dst
    return ((dst.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)


def _rounded(x: Tensor, name: str) -> Tensor:
    return get_format(name).round_trip(x).bfloat16()


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
