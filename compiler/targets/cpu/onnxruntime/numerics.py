"""The numeric contract for ONNX Runtime's CPU operators, and their weight storage."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.formats import FIDELITIES, get_format
from tilewright.compiler.ir.info import NodeInfo, info, product_info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.targets.contract.record import (
    EMULATED,
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
)
from tilewright.compiler.targets.interface.base import WeightStorage
from tilewright.errors import CompileError

NATIVE_BITS = {"bfp8": 8, "bfp4": 4, "q80": 8, "q40": 4}
"""Formats stored exactly as MatMulNBits blocks, with the bits per code.

q41 is excluded. A float zero point of -minimum / scale rounds, so values differ in nearly all
blocks, and this matmul does not use int8 activations.
"""

EMBEDDING = "embedding"
"""Tensor group for lookups instead of matmuls."""

EXPERTS_IN = "experts_ff1_3"
"""Tensor group for expert weights with a row per inner channel."""

INT8_LEVEL = 4
"""MatMulNBits accuracy level with int8 activations per block."""


def is_native(format_name: str, block_axis: str, fidelity: str, *, exact: bool) -> bool:
    """Return whether a matmul stores its weight in blocks, with int8 activations.

    All other weights are float32 values. With three or more phases, or ``exact``, block formats
    also become float32: MatMulNBits would dequantize again at every call.
    """
    if exact or FIDELITIES[fidelity].num_phases >= 3:
        return False
    return format_name in NATIVE_BITS and block_axis == "in"


def is_bfloat16_table(format_name: str) -> bool:
    """Return whether an embedding table is stored as bfloat16, for any ``compute``: rows are only
    read.

    All other tables are float32.
    """
    return format_name == "bf16"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """MatMulNBits layout for a ``[num_rows, columns]`` weight.

    A row has ``num_blocks`` blocks, the last padded. A block has ``block`` codes in ``block_bytes``
    bytes, and a float32 scale.
    """

    num_rows: int
    num_blocks: int
    block: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes for all codes and scales."""
        return self.num_rows * self.num_blocks * (self.block_bytes + 4)


def block_layout(shape: tuple[int, ...], format_name: str) -> BlockLayout:
    """Return the layout for a weight ``[out, in]`` in a native format."""
    return _blocks(shape, NATIVE_BITS[format_name], get_format(format_name).block)


def _blocks(shape: tuple[int, ...], bits: int, block: int) -> BlockLayout:
    num_rows, num_columns = shape
    return BlockLayout(
        num_rows=num_rows,
        num_blocks=-(-num_columns // block),
        block=block,
        block_bytes=block * bits // 8,
    )


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """QMoE storage for an expert block: a common code width and block size for its three weights.

    Inner channels are padded to whole blocks.
    """

    bits: int
    block: int

    def padded(self, size: int) -> int:
        """Return ``size`` channels rounded up to whole blocks."""
        return -(-size // self.block) * self.block


def expert_layout(weights: Sequence[NodeInfo], *, exact: bool) -> ExpertLayout | None:
    """Return the storage for an expert block's weights. None: float32 values.

    Narrow codes are widened and long blocks are split, without changing values. If a matmul needs
    float arithmetic, all three use float: no operator mixes both.
    """
    products = []
    for weight in weights:
        recipe, compute = weight.recipe, weight.compute
        assert recipe is not None and recipe.format is not None and compute is not None
        products.append((recipe.format, recipe.block_axis, compute.decode))
    if not all(is_native(name, axis, requested, exact=exact) for name, axis, requested in products):
        return None
    return ExpertLayout(
        bits=max(NATIVE_BITS[name] for name, _, _ in products),
        block=min(get_format(name).block for name, _, _ in products),
    )


def phases_differ(
    format_name: str, block_axis: str, fidelities: tuple[str, str], *, exact: bool
) -> bool:
    """Return whether prefill and decode request different arithmetic. A session supports only
    one.
    """
    native = {is_native(format_name, block_axis, each, exact=exact) for each in fidelities}
    return len(native) > 1


def check_fidelities(graph_module: GraphModule, *, exact: bool) -> None:
    """Check that both phases have equal arithmetic: a session has a single copy of a weight.

    ``exact`` always has equal arithmetic.

    Raises:
        CompileError: The phases of a matmul differ.
    """
    for facts, recipe in _products(graph_module):
        assert facts.compute is not None and recipe is not None and recipe.format is not None
        fidelities = facts.compute.prefill, facts.compute.decode
        if phases_differ(recipe.format, recipe.block_axis, fidelities, exact=exact):
            raise CompileError(f"{facts.fqn}: {facts.op_group} is {_why_unsupported(fidelities)}")


def _products(graph_module: GraphModule) -> Iterator[tuple[NodeInfo, WeightRecipe | None]]:
    """Yield the metadata and weight of every matmul."""
    for node in find_calls(graph_module.graph, ops.linear, ops.experts):
        weights = node.args[1:2] if node.target is ops.linear.overload else node.args[2:5]
        for weight in weights:
            assert isinstance(weight, Node)
            yield product_info(node, weight), info(weight).recipe


def _why_unsupported(fidelities: tuple[str, str]) -> str:
    prefill, decode = fidelities
    return (
        f"{prefill} in prefill and {decode} in decode; the cpu target holds one of float and int8 "
        "arithmetic a layer: give both phases three or more phases (hifi3, hifi4) or both fewer"
    )


def weight_storage(
    recipe: WeightRecipe,
    facts: NodeInfo,
    *,
    exact: bool,
    block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
) -> WeightStorage:
    """Return a weight's storage: blocks, a bfloat16 table, or float32 values.

    ``block`` has the other weights of the expert block, with common storage. Without it, all three
    are assumed to equal this weight.

    Raises:
        CompileError: The phases' fidelities differ in arithmetic.
    """
    group, name, num_elements = facts.tensor_group, recipe.format, math.prod(recipe.shape)
    assert name is not None
    if group == EMBEDDING and is_bfloat16_table(name):
        return WeightStorage("bfloat16", 2 * num_elements)
    if group is None or group == EMBEDDING:
        return WeightStorage("float32", 4 * num_elements)
    assert facts.compute is not None
    fidelities = facts.compute.prefill, facts.compute.decode
    if phases_differ(name, recipe.block_axis, fidelities, exact=exact):
        raise CompileError(f"{group} is {_why_unsupported(fidelities)}")
    products = [
        dataclasses.replace(requested, recipe=own) for own, requested in ((recipe, facts), *block)
    ]
    shared = expert_layout(products, exact=exact)
    if shared is None:
        return WeightStorage("float32", 4 * num_elements, "[in, out]")
    layout = _blocks(_stored_shape(recipe.shape, shared, group), shared.bits, shared.block)
    is_own = shared == ExpertLayout(NATIVE_BITS[name], get_format(name).block)
    kind = f"{name} blocks" if is_own else f"{shared.bits}-bit blocks of {shared.block}"
    return WeightStorage(kind, layout.num_bytes)


def _stored_shape(shape: tuple[int, ...], layout: ExpertLayout, group: str) -> tuple[int, int]:
    """Return the stored rows and columns of a weight. Experts' inner channels are padded to whole
    blocks.
    """
    *experts, num_rows, num_columns = shape
    if group == EXPERTS_IN:
        num_rows = layout.padded(num_rows)
    return math.prod(experts) * num_rows, num_columns


def meanings(exact: bool) -> Meanings:
    """Return the target's answers for the numeric contract. ``exact`` is ``--compute exact``."""

    def weight(name: str, axis: str) -> Meaning:
        return Meaning(HONOURED, name if axis == "in" else f"{name} blocks along out")

    def fidelity(format_name: str, axis: str, requested: str, phase: str) -> Meaning:
        if is_native(format_name, axis, requested, exact=exact):
            return Meaning(EMULATED, "int8 activations")
        return Meaning(NOT_HONOURED, "fp32")

    return Meanings(
        weight=weight,
        fidelity=fidelity,
        attention=lambda requested, phase: Meaning(NOT_HONOURED, "fp32"),
        kv_cache=lambda name: Meaning(HONOURED if name == "fp32" else NOT_HONOURED, "fp32"),
        activation=lambda name: Meaning(NOT_HONOURED, "fp32"),
        together=_of_experts,
    )


def _of_experts(answers: Sequence[Meaning]) -> Meaning:
    """Combine answers: an expert block uses float arithmetic if any of its matmuls does."""
    return next((each for each in answers if each.status == NOT_HONOURED), answers[0])
