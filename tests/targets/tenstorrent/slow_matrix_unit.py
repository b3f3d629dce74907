"""The matrix unit by its specification, a phase with 16 products at a time, in int64.

Shares only block packing with the tested code. Also has operands for comparisons: all exponents,
denormals, zeros, cancellation, inf and NaN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.formats import BlockFloat, get_format
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import PHASES, MatmulSettings

LOST_BITS = (0, 5, 7, 12)
KINDS = ("normal", "any exponent", "tiny", "huge", "sparse", "cancelling", "any bits")
_NAME = re.compile(
    r"(\w+)\.(\w+)\.(\w+)\.fp32dst([01])\.l1acc([01])\.block(\d+)\.out_(bf16|bfp8|bfp4|fp32)"
)


def golden_case(
    name: str, arrays: Mapping[str, np.ndarray]
) -> tuple[Tensor, Tensor, MatmulSettings]:
    """Return rounded operands and settings from a golden file."""
    match = _NAME.fullmatch(name)
    assert match, name
    *formats, fidelity, fp32_dst, l1_acc, k_block, out = match.groups()
    act, weight = (
        get_format(form).round_trip(torch.from_numpy(arrays[key])).bfloat16()
        for key, form in zip(("act", "weight"), formats, strict=True)
    )
    flags = fp32_dst == "1", l1_acc == "1"
    return act, weight, MatmulSettings(PHASES[fidelity], *flags, int(k_block), out)


def operand(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return bfloat16 operands by a name in `KINDS`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if kind == "any bits":  # includes denormals, inf and NaN
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int32)
        return bits.to(torch.int16).view(torch.bfloat16)
    spread = {"any exponent": (-126, 128), "tiny": (-140, -60), "huge": (50, 128)}.get(kind)
    if spread:
        x = torch.ldexp(x.sign() + x / 8, torch.randint(*spread, shape, generator=generator))
    if kind == "sparse":
        x = x * (torch.rand(shape, generator=generator) < 0.2) * torch.where(x > 1, 2.0**-130, 1.0)
    if kind == "cancelling":  # neighbors with equal size and opposite sign
        half = x[..., ::2].repeat_interleave(2, -1)[..., : shape[-1]]
        x = half * torch.tensor([1.0, -1.0]).repeat(shape[-1])[: shape[-1]]
    return x.bfloat16()


def slow_matmul(act: Tensor, weight: Tensor, settings: MatmulSettings) -> Tensor:
    """Return float32 ``[M, N]`` from bfloat16 ``[M, K]`` and ``[K, N]``, by K blocks."""
    num_k, num_n = weight.shape
    words_act, words_weight = _words(act), _words(weight)
    padding = -num_k % settings.k_block, -num_n % 32
    words_act = np.pad(words_act, ((0, 0), (0, padding[0])))
    words_weight = np.pad(words_weight, ((0, padding[0]), (0, padding[1])))
    num_blocks = words_act.shape[1] // settings.k_block
    partial = None
    for block in range(num_blocks):
        is_last = block == num_blocks - 1
        reloads = partial is not None and (is_last or not settings.l1_acc)
        dst = np.zeros((len(act), num_n + padding[1]), np.int64)
        if reloads:
            dst = partial.view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF
        for k in range(block * settings.k_block, (block + 1) * settings.k_block, 32):
            for phase in range(settings.num_phases):
                for half in (slice(k, k + 16), slice(k + 16, k + 32)):
                    products = words_act[:, half, None], words_weight[None, half]
                    dst = _add_products(*products, dst, phase, settings)
        packed = _packed(dst, _partial_format(settings) if not is_last else settings.out_format)
        if settings.l1_acc and partial is not None and not is_last:
            packed = _added_in_l1(partial, packed, settings.fp32_dst)
        partial = packed
    return packed[:, :num_n]


def _added_in_l1(partial: Tensor, packed: Tensor, fp32: bool) -> Tensor:
    """Infinities with both signs give NaN. In bf16, a NaN becomes an infinity at the next sum."""
    total = partial + packed if fp32 else (partial + packed).bfloat16().float()
    total = torch.where(total.abs() < 2.0**-126, 0.0, total)
    undefined = torch.full_like(total, torch.nan)
    if not fp32:
        infinity = torch.where(packed.isinf(), packed, torch.inf)
        undefined = torch.where(partial.isnan(), infinity, undefined)
    return torch.where(total.isnan(), undefined, total)


def _partial_format(settings: MatmulSettings) -> str:
    if settings.fp32_dst:
        return "fp32"
    return "bf16" if settings.l1_acc else settings.out_format


def _packed(dst: np.ndarray, name: str) -> Tensor:
    form = get_format(name)
    if name == "bf16":
        dst = (dst + 0x8000) & 0xFFFF0000
    values = torch.from_numpy(dst.astype(np.uint32).view(np.float32))
    return form.device_round_trip(values) if isinstance(form, BlockFloat) else values


def _words(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.int16).numpy().astype(np.int64) & 0xFFFF


def _add_products(
    act: np.ndarray, weight: np.ndarray, dst: np.ndarray, phase: int, settings: MatmulSettings
) -> np.ndarray:
    """Return Dst after a phase of 16 products. ``act`` [M, 16, 1], ``weight`` [1, 16, N], words."""
    fp32 = settings.fp32_dst
    exponents = [(words >> 7) & 255 for words in (act, weight)]
    is_zero = (exponents[0] == 0) | (exponents[1] == 0)
    act_part = (act & 1) * 64 if phase & 2 else ((act & 127) + 128) // 2
    weight_part = (weight & 7) * 4 if phase & 1 else ((weight & 127) + 128) // 8
    exponent = np.where(is_zero, 0, exponents[0] + exponents[1] - 127 - LOST_BITS[phase])
    product = np.where(is_zero, 0, act_part * weight_part)
    sign = np.where((act ^ weight) >> 15 == 1, -1, 1)
    sums = []
    for group in (slice(0, 8), slice(8, 16)):
        largest = exponent[:, group].max(1)
        shift = np.minimum(largest[:, None] - exponent[:, group], 40)
        aligned = (2 * product[:, group] + (1 << shift)) >> (shift + 1)
        total = (sign[:, group] * aligned).sum(1)
        sums.append((np.maximum(largest, 0), np.where(largest > 0, total << 13, 0)))
    dst_exponent = (dst >> 23) & 255
    magnitude = np.where(dst_exponent > 0, (dst & 0x7FFFFF) + 0x800000, 0)
    largest = np.maximum(np.maximum(sums[0][0], sums[1][0]), dst_exponent)
    total = _rounded(magnitude, largest - dst_exponent, fp32) * np.where(dst >> 31 == 1, -1, 1)
    for group_exponent, group_sum in sums:
        total = total + _rounded(group_sum, largest - group_exponent, fp32)
    return _normalised(total, largest, fp32, settings.sign_error)


def _rounded(value: np.ndarray, shift: np.ndarray, fp32: bool) -> np.ndarray:
    """Align to the common exponent. A 16-bit Dst then has 10 fraction bits."""
    shift = np.minimum(shift, 40)
    value = (2 * value + (1 << shift)) >> (shift + 1)
    return value if fp32 else (value + 4096) >> 13 << 13


def _normalised(
    total: np.ndarray, exponent: np.ndarray, fp32: bool, sign_error: bool
) -> np.ndarray:
    """Return the word for ``total * 2 ** (exponent - 150)``, halves away from zero."""
    magnitude = np.abs(total)
    num_bits = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)
    surplus = num_bits - (24 if fp32 else 8)
    dropped, added = np.maximum(surplus, 0), np.maximum(-surplus, 0)
    kept = ((2 * magnitude + (1 << dropped)) >> (dropped + 1)) << added
    exponent = exponent + num_bits - 24
    if fp32 and sign_error:  # Wormhole shifts -1 by four bits in the wrong direction
        kept, exponent = (
            np.where(total == -1, 0, kept),
            np.where(total == -1, exponent + 27, exponent),
        )
    elif not fp32:
        kept = kept << 16
    exponent = exponent + (kept >> 24)
    word = np.where(exponent >= 255, 255 << 23, (exponent << 23) + (kept & 0x7FFFFF))
    return np.where((total == 0) | (exponent <= 0), 0, word + ((total < 0).astype(np.int64) << 31))
