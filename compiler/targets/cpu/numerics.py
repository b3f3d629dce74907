"""What ONNX Runtime's CPU operators make of formats and fidelities: the cpu numeric contract."""

from __future__ import annotations

from torch.fx import GraphModule

from compiler import ops
from compiler.errors import CompileError
from compiler.formats.fidelity import FIDELITIES
from compiler.ir.info import info
from compiler.ir.rewrite import find_calls
from compiler.targets.contract import EMULATED, HONOURED, NOT_HONOURED, Meaning, Meanings

NATIVE_BITS = {"bfp8": 8, "bfp4": 4, "q80": 8, "q40": 4}
"""Formats that MatMulNBits holds in blocks, exactly, with the bits of a code."""

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


def check_fidelities(graph_module: GraphModule, *, exact: bool) -> None:
    """One session holds one copy of a product, so both phases must come to the same arithmetic.

    They always do when ``exact`` asks for float arithmetic everywhere.

    Raises:
        CompileError: naming the product whose phases differ.
    """
    for node in find_calls(graph_module.graph, ops.linear):
        facts = info(node)
        recipe = info(node.args[1]).recipe  # type: ignore[arg-type]
        assert facts.compute is not None and recipe is not None and recipe.format is not None
        prefill, decode = facts.compute.prefill, facts.compute.decode
        native = {
            is_native(recipe.format, recipe.block_axis, fidelity, exact=exact)
            for fidelity in (prefill, decode)
        }
        if len(native) > 1:
            raise CompileError(
                f"{facts.fqn}: {facts.op_group} is {prefill} in prefill and {decode} in decode; "
                "the cpu target holds one of float and int8 arithmetic a layer: give both phases "
                "three or more phases (hifi3, hifi4) or both fewer"
            )


def meanings(exact: bool) -> Meanings:
    """The contract's answers; ``exact`` is ``--compute exact``."""

    def weight(name: str, axis: str) -> Meaning:
        return Meaning(HONOURED, name if axis == "in" else f"{name} blocks along out")

    def fidelity(format_name: str, axis: str, asked: str) -> Meaning:
        if is_native(format_name, axis, asked, exact=exact):
            return Meaning(EMULATED, "int8 activations")
        return Meaning(NOT_HONOURED, "fp32")

    return Meanings(
        weight=weight,
        fidelity=fidelity,
        attention=lambda asked: Meaning(NOT_HONOURED, "fp32"),
        kv_cache=lambda name: Meaning(HONOURED if name == "fp32" else NOT_HONOURED, "fp32"),
        activation=lambda name: Meaning(NOT_HONOURED, "fp32"),
    )
