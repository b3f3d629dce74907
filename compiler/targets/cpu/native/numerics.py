"""The native kernels' numeric contract: storage of weights and caches, and arithmetic."""

from __future__ import annotations

from tilewright.compiler.formats import FIDELITIES, get_format
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.contract.record import (
    EMULATED,
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
)

FP32, BF16, FP16, VECTOR = "fp32", "bf16", "fp16", "vector"
K_KINDS = ("q4_k", "q5_k", "q6_k", "iq4_xs")
FLOAT_CODES = ("fp8",)
"""Formats with float codes: kernels multiply them as bfloat16, or as float32 if exact."""

NF4 = "nf4"
"""The values of its codes are only exact in float32."""

SCALED_CODES = (*FLOAT_CODES, NF4, "nvfp4")
"""Formats with a float32 scale per block."""

BLOCK_KINDS = ("q80", "q40", "q41", "q50", "q51", "bfp8", "bfp4", *K_KINDS, *SCALED_CODES)
"""Formats with block kernels. Blocks in ``K_KINDS`` are only read from files."""

SCALES_OF_16 = ("bfp8", "bfp4", "q6_k", "nvfp4")
"""Formats with a scale per 16 values. Other blocks have 32. Int8 activations have the block size of
the weight.
"""

INT8_IN_16 = "int8 activations, a scale for 16"

HAVE_MINIMUMS = ("q41", "q51", "q4_k", "q5_k")

ROUNDED = "bf16"
"""Rounding of values between matmuls, an ``activation`` format."""

AS_FP32, AS_BF16, AS_INT8 = "fp32", "bf16", "int8"
_EXACT_IN_BF16 = ("bf16", "bfp8", "bfp4", "bfp2", "mxfp4")
_CACHES = {"fp32": (FP32, 0), "bf16": (BF16, 0), "bfp8": ("bfp8", 7), "bfp4": (BF16, 3)}


def storage_format(recipe: WeightRecipe) -> str:
    """Return a weight's storage: its own blocks, float16, bfloat16 if exact, else float32.

    Every storage is exact.
    """
    assert recipe.format is not None
    if recipe.format in BLOCK_KINDS and recipe.block_axis == "in":
        return recipe.format
    if recipe.format == FP16:
        return FP16
    return BF16 if recipe.format in _EXACT_IN_BF16 and not recipe.is_stored else FP32


def arithmetic(kind: str, fidelity: str, *, exact: bool) -> str:
    """Return the operand type for matmuls with a weight. Sums are fp32."""
    requested = FIDELITIES[fidelity]
    if exact or kind in (FP32, FP16, NF4) or requested.fp32_outputs:
        return AS_FP32
    if kind in BLOCK_KINDS and kind not in FLOAT_CODES and requested.num_phases < 3:
        return AS_INT8
    return AS_FP32 if kind in HAVE_MINIMUMS else AS_BF16  # minimums are not codes


def cache_kind(format_name: str, *, exact: bool) -> tuple[str, int]:
    """Return the storage of keys and values, and the magnitude bits for rounding before it (0:
    none).

    Attention reads all storages except float32 as bfloat16.
    """
    return (FP32, 0) if exact else _CACHES.get(format_name, (FP32, 0))


def meanings(*, exact: bool) -> Meanings:
    """Return the target's answers for the numeric contract. ``exact`` is ``--compute exact``."""

    def weight(name: str, axis: str) -> Meaning:
        if name in BLOCK_KINDS and axis == "in":
            return Meaning(HONOURED, name)
        stored = storage_format(WeightRecipe((), (1, 1), name, axis))
        if stored == name:
            return Meaning(HONOURED, name)
        where = f", blocks along {axis}" if get_format(name).block > 1 else ""
        return Meaning(EMULATED, f"{name} values in {stored}{where}")

    def fidelity(format_name: str, axis: str, requested: str, phase: str) -> Meaning:
        kind = storage_format(WeightRecipe((), (1, 1), format_name, axis))
        found = arithmetic(kind, requested, exact=exact)
        if found == AS_INT8:
            return Meaning(EMULATED, INT8_IN_16 if kind in SCALES_OF_16 else "int8 activations")
        if found == AS_BF16:
            return Meaning(EMULATED, "bf16 x bf16, fp32 sums")
        return Meaning(NOT_HONOURED, "fp32")

    def attention(requested: str, phase: str) -> Meaning:
        if exact:
            return Meaning(NOT_HONOURED, "fp32")
        return Meaning(EMULATED, "as the cache, fp32 sums and softmax")

    def kv_cache(name: str) -> Meaning:
        stored, bits = cache_kind(name, exact=exact)
        if bits and stored != name:
            return Meaning(EMULATED, f"{name} values in {stored}")
        return Meaning(HONOURED if stored == name else NOT_HONOURED, stored)

    def activation(name: str) -> Meaning:
        if name == ROUNDED and not exact:
            return Meaning(HONOURED, name)
        return Meaning(NOT_HONOURED, "fp32 between products")

    return Meanings(
        weight=weight,
        fidelity=fidelity,
        attention=attention,
        kv_cache=kv_cache,
        activation=activation,
    )
