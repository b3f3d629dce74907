"""What ONNX Runtime's CPU operators make of formats and fidelities: the cpu numeric contract, and
how weights are held for it.
"""

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
from tilewright.compiler.targets.interface.base import Holding
from tilewright.errors import CompileError

NATIVE_BITS = {"bfp8": 8, "bfp4": 4, "q80": 8, "q40": 4}
"""Formats that MatMulNBits holds in blocks, exactly, with the bits of a code.

Not q41: a float zero point of -minimum / scale rounds, which gives other values in 96 % of the
default model's blocks and in every tensor of it; nor is such a product made of int8 activations.
"""

EMBEDDING = "embedding"
"""The tensor group whose weights are looked up, not multiplied."""

EXPERTS_IN = "experts_ff1_3"
"""The tensor group of experts' weights that have a row for each inner channel."""

INT8_LEVEL = 4
"""MatMulNBits accuracy level that rounds activations to int8 by block."""


def is_native(format_name: str, block_axis: str, fidelity: str, *, exact: bool) -> bool:
    """Whether a product keeps its weight in blocks, with int8 activations.

    Everything else is held as float32 values: so are block formats when three phases or more, or
    ``exact``, ask for float arithmetic, since MatMulNBits dequantises anew at every such call.
    """
    if exact or FIDELITIES[fidelity].num_phases >= 3:
        return False
    return format_name in NATIVE_BITS and block_axis == "in"


def is_bfloat16_table(format_name: str) -> bool:
    """Whether an embedding table is kept in two bytes an entry: whatever ``compute``, since rows
    are only looked up. Every other table is held as float32 values.
    """
    return format_name == "bf16"


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """MatMulNBits' layout of a ``[num_rows, columns]`` weight: ``num_blocks`` a row, the last one
    padded, of ``block`` codes in ``block_bytes`` bytes, with a float32 scale each.
    """

    num_rows: int
    num_blocks: int
    block: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes that all codes and scales take."""
        return self.num_rows * self.num_blocks * (self.block_bytes + 4)


def block_layout(shape: tuple[int, ...], format_name: str) -> BlockLayout:
    """The layout of a weight ``[out, in]`` in a native format."""
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
    """What QMoE holds a block of experts in: codes of one width, one block size, for all three of
    its weights; so inner channels are padded to whole blocks.
    """

    bits: int
    block: int

    def padded(self, size: int) -> int:
        """The number of channels that ``size`` of them fill whole blocks with."""
        return -(-size // self.block) * self.block


def expert_layout(weights: Sequence[NodeInfo], *, exact: bool) -> ExpertLayout | None:
    """How the weights of one block of experts are held; None for float32 values.

    A narrower format's codes are widened and longer blocks cut, which changes no value. Where one
    of the products needs float arithmetic, all three have it: no operator mixes the two.
    """
    products = []
    for weight in weights:
        recipe, compute = weight.recipe, weight.compute
        assert recipe is not None and recipe.format is not None and compute is not None
        products.append((recipe.format, recipe.block_axis, compute.decode))
    if not all(is_native(name, axis, asked, exact=exact) for name, axis, asked in products):
        return None
    return ExpertLayout(
        bits=max(NATIVE_BITS[name] for name, _, _ in products),
        block=min(get_format(name).block for name, _, _ in products),
    )


def phases_differ(
    format_name: str, block_axis: str, fidelities: tuple[str, str], *, exact: bool
) -> bool:
    """Whether prefill and decode ask for different arithmetic, which one session cannot hold."""
    native = {is_native(format_name, block_axis, each, exact=exact) for each in fidelities}
    return len(native) > 1


def check_fidelities(graph_module: GraphModule, *, exact: bool) -> None:
    """One session holds one copy of a product, so both phases must come to the same arithmetic.

    They always do when ``exact`` asks for float arithmetic everywhere.

    Raises:
        CompileError: naming the product whose phases differ.
    """
    for facts, recipe in _products(graph_module):
        assert facts.compute is not None and recipe is not None and recipe.format is not None
        fidelities = facts.compute.prefill, facts.compute.decode
        if phases_differ(recipe.format, recipe.block_axis, fidelities, exact=exact):
            raise CompileError(f"{facts.fqn}: {facts.op_group} is {_why_not_held(fidelities)}")


def _products(graph_module: GraphModule) -> Iterator[tuple[NodeInfo, WeightRecipe | None]]:
    """What is known of every product, and its weight."""
    for node in find_calls(graph_module.graph, ops.linear, ops.experts):
        weights = node.args[1:2] if node.target is ops.linear.overload else node.args[2:5]
        for weight in weights:
            assert isinstance(weight, Node)
            yield product_info(node, weight), info(weight).recipe


def _why_not_held(fidelities: tuple[str, str]) -> str:
    prefill, decode = fidelities
    return (
        f"{prefill} in prefill and {decode} in decode; the cpu target holds one of float and int8 "
        "arithmetic a layer: give both phases three or more phases (hifi3, hifi4) or both fewer"
    )


def holding(
    recipe: WeightRecipe,
    facts: NodeInfo,
    *,
    exact: bool,
    block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
) -> Holding:
    """What the emitter makes of a weight: blocks, a table in bfloat16, or float32 values.

    ``block``: the other weights of a block of experts, which are held alike; without them as if
    all three were as this one.

    Raises:
        CompileError: where the phases' fidelities ask for different arithmetic.
    """
    group, name, num_elements = facts.tensor_group, recipe.format, math.prod(recipe.shape)
    assert name is not None
    if group == EMBEDDING and is_bfloat16_table(name):
        return Holding("bfloat16", 2 * num_elements)
    if group is None or group == EMBEDDING:
        return Holding("float32", 4 * num_elements)
    assert facts.compute is not None
    fidelities = facts.compute.prefill, facts.compute.decode
    if phases_differ(name, recipe.block_axis, fidelities, exact=exact):
        raise CompileError(f"{group} is {_why_not_held(fidelities)}")
    products = [dataclasses.replace(asked, recipe=own) for own, asked in ((recipe, facts), *block)]
    shared = expert_layout(products, exact=exact)
    if shared is None:
        return Holding("float32", 4 * num_elements, "[in, out]")
    layout = _blocks(_held_shape(recipe.shape, shared, group), shared.bits, shared.block)
    is_own = shared == ExpertLayout(NATIVE_BITS[name], get_format(name).block)
    kind = f"{name} blocks" if is_own else f"{shared.bits}-bit blocks of {shared.block}"
    return Holding(kind, layout.num_bytes)


def _held_shape(shape: tuple[int, ...], layout: ExpertLayout, group: str) -> tuple[int, int]:
    """Rows and columns of a product's weight; experts' inner channels fill whole blocks."""
    *experts, num_rows, num_columns = shape
    if group == EXPERTS_IN:
        num_rows = layout.padded(num_rows)
    return math.prod(experts) * num_rows, num_columns


def meanings(exact: bool) -> Meanings:
    """Make the target's answers to the numeric contract; ``exact`` is ``--compute exact``."""

    def weight(name: str, axis: str) -> Meaning:
        return Meaning(HONOURED, name if axis == "in" else f"{name} blocks along out")

    def fidelity(format_name: str, axis: str, asked: str, phase: str) -> Meaning:
        if is_native(format_name, axis, asked, exact=exact):
            return Meaning(EMULATED, "int8 activations")
        return Meaning(NOT_HONOURED, "fp32")

    return Meanings(
        weight=weight,
        fidelity=fidelity,
        attention=lambda asked, phase: Meaning(NOT_HONOURED, "fp32"),
        kv_cache=lambda name: Meaning(HONOURED if name == "fp32" else NOT_HONOURED, "fp32"),
        activation=lambda name: Meaning(NOT_HONOURED, "fp32"),
        together=_of_experts,
    )


def _of_experts(answers: Sequence[Meaning]) -> Meaning:
    """One operator makes all products of a block of experts: in float where one of them is."""
    return next((each for each in answers if each.status == NOT_HONOURED), answers[0])
