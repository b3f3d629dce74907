"""Conversion of a kernel program to the library's instructions and numbered tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch.fx import GraphModule

from tilewright.compiler.ir.info import info
from tilewright.compiler.precision import ALWAYS_HIGH
from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.numerics import ROUNDED, cache_kind, storage_format
from tilewright.compiler.targets.cpu.native.program.assemble_mixers import MIXERS
from tilewright.compiler.targets.cpu.native.program.assembly import (
    Assembly,
    arithmetics_of,
    place_of,
)
from tilewright.compiler.targets.cpu.native.program.bundle import BundledTensor, Packed
from tilewright.compiler.targets.program.instructions import (
    LOGITS,
    AddGatedOp,
    AllReduceAdd,
    AllReduceOp,
    AttentionOp,
    BufferView,
    CrossAttentionOp,
    Elementwise,
    EmbedOp,
    ExpertLinearOp,
    ExpertSum,
    GatherOp,
    Instruction,
    KernelProgram,
    LinearOp,
    NormHeads,
    NormOp,
    ReadHiddenOp,
    SigmoidGate,
    SwiGLUOp,
    TopKRouteOp,
)
from tilewright.errors import CompileError


def assemble(plan: KernelProgram, *, exact: bool, rounded: Collection[str] = ()) -> Assembly:
    """Return the library's program for a plan.

    ``rounded`` has the matmul names with bfloat16 rounding around them (see
    :func:`_roundings`).

    Raises:
        CompileError: A number is divided by a value.
    """
    assembly = Assembly(exact)
    for each, flags in zip(plan.instructions, _roundings(plan, rounded), strict=True):
        first = len(assembly.instructions)
        (_MAKERS | MIXERS)[type(each)](assembly, each)
        for made in assembly.instructions[first:]:
            made.flags |= flags
    if plan.logit_columns:  # an additional buffer for all ranks' logits
        whole, own = BufferView(len(plan.buffers), plan.vocab_size), plan.instructions[-1]
        assert not isinstance(own, TopKRouteOp)
        assembly.append("gather_logits", whole, x=place_of(own.out))
    return assembly


def rounded_products(graph_module: GraphModule) -> set[str]:
    """Return the matmul names with a bfloat16 ``activation``."""
    facts = [info(node) for node in graph_module.graph.nodes]
    return {each.fqn for each in facts if each.formats and each.formats.in0 == ROUNDED}


def _roundings(plan: KernelProgram, rounded: Collection[str]) -> list[int]:
    """Return each instruction's rounding flags.

    A matmul rounds its result, its residual sum and its fused norm. Other instructions follow the
    next matmul that reads their result. Logits, routers and linear attention gates stay float:
    their cost is small and their effect is large.
    """
    flags, rounds = list[int](), False
    logits = _widths(plan)[1]
    for each in reversed(plan.instructions):
        kept = False
        if isinstance(each, LinearOp | ExpertLinearOp | ExpertSum):
            rounds = each.fqn in rounded
            kept = each.group in ALWAYS_HIGH
        out = None if isinstance(each, TopKRouteOp) else each.out
        own = kept or out is None or out.buffer == logits
        flags.append(rounds * (lib.NORM_ROUNDED | (0 if own else lib.ROUNDED)))
    return flags[::-1]


def pack(plan: KernelProgram, assembly: Assembly) -> Packed:
    """Return the program for a plan and its assembly."""
    tensors = [
        BundledTensor(
            wanted.kind,
            wanted.rows,
            wanted.columns,
            wanted.num_bytes,
            ".".join(wanted.recipe.names[:1]),
        )
        for wanted in assembly.wanted
    ]
    widths, logits = _widths(plan)
    assert widths[logits] == plan.vocab_size, "logits share their buffer"
    return Packed(
        tensors=tuple(tensors),
        instructions=tuple(assembly.instructions),
        states=tuple(assembly.states),
        widths=tuple(widths),
        logits=logits,
        logit_columns=plan.logit_columns,
    )


def _widths(plan: KernelProgram) -> tuple[list[int], int]:
    """Return all buffer widths, and the number of the logits buffer."""
    widths = [buffer.width for buffer in plan.buffers]
    if plan.logit_columns:
        return [*widths, plan.vocab_size], len(widths)
    return widths, [buffer.role for buffer in plan.buffers].index(LOGITS)


def _embed(assembly: Assembly, each: EmbedOp) -> None:
    assembly.append("embed", each.out, weight=assembly.weight(each.table))


def _read_hidden(assembly: Assembly, node: ReadHiddenOp) -> None:
    assembly.append("read_hidden", node.out)


def _linear(assembly: Assembly, each: LinearOp) -> None:
    assert each.compute is not None, f"{each.fqn} has no fidelity"
    kind, num_rows = storage_format(each.weight), each.weight.num_rows
    assembly.append(
        "linear",
        each.out,
        x=place_of(each.x),
        flags=lib.RESIDUAL * each.residual | lib.PAIRED * each.swiglu | lib.CROSS * each.is_cross,
        arithmetic=arithmetics_of(kind, each.compute, exact=assembly.exact),
        weight=assembly.weight(each.weight, paired=each.swiglu),
        norm=-1 if each.norm is None else assembly.vector(each.norm),
        bias=assembly.bias(each.bias, num_rows, paired=each.swiglu),
        eps=each.eps,
    )


def _cross_attend(assembly: Assembly, node: CrossAttentionOp) -> None:
    assembly.append(
        "cross_attend",
        node.out,
        x=place_of(node.q),
        norm=assembly.vector(node.norm),
        eps=node.eps,
        num_heads=node.num_heads,
        num_key_heads=node.num_kv_heads,
        window=node.first,
        scale=node.scale,
    )


def _add_gated(assembly: Assembly, node: AddGatedOp) -> None:
    gate = assembly.vector(node.gate)
    assembly.append("add_gated", node.out, x=place_of(node.x), norm=gate)


def _attend(assembly: Assembly, each: AttentionOp) -> None:
    cache_format, bits = cache_kind(each.state.format, exact=assembly.exact)
    _, num_heads, head_dim = each.state.shape
    kind, cache = lib.STATES.index("keys_values"), lib.CACHES.index(cache_format)
    state = lib.TwState(kind, cache, num_heads, head_dim, 0, bits)
    assembly.append(
        "attend",
        each.out,
        x=place_of(each.qkv),
        flags=lib.INTERLEAVED * each.interleaved,
        other=assembly.vector(each.inv_freq),
        state=assembly.state(state),
        num_heads=each.num_heads,
        window=each.window,
        scale=each.scale,
        soft_cap=each.soft_cap,
        factor=each.factor,
        bias=-1 if each.sinks is None else assembly.vector(each.sinks),
    )


def _gather(assembly: Assembly, each: GatherOp) -> None:
    assembly.append("gather", each.out, x=place_of(each.x))


def _swiglu(assembly: Assembly, each: SwiGLUOp) -> None:
    assembly.append("swiglu", each.out, x=place_of(each.gate), y=place_of(each.up))


def _norm_heads(assembly: Assembly, each: NormHeads) -> None:
    norms = {"norm": assembly.vector(each.q_norm), "other": assembly.vector(each.k_norm)}
    heads = {"num_heads": each.num_heads, "eps": each.eps}
    assembly.append("norm_heads", each.out, x=place_of(each.qkv), **norms, **heads)


def _norm(assembly: Assembly, each: NormOp) -> None:
    norm = assembly.vector(each.weight)
    assembly.append("norm", each.out, x=place_of(each.x), norm=norm, eps=each.eps)


def _elementwise(assembly: Assembly, each: Elementwise) -> None:
    """Emit an elementwise instruction. A number may be first only if the order has no effect."""
    places = [given for given in each.inputs if isinstance(given, BufferView)]
    numbers = [given for given in each.inputs if isinstance(given, int | float)]
    function = "gelu_tanh" if "tanh" in each.inputs else each.function
    if each.function == "div" and not isinstance(each.inputs[0], BufferView):
        raise CompileError("a number divided by a value has no kernel on backend native")
    assembly.append(
        "elementwise",
        each.out,
        x=place_of(places[0]),
        y=place_of(places[1] if len(places) > 1 else None),
        number=float(numbers[0]) if numbers else 0.0,
        function=lib.FUNCTIONS.index(function),
    )


def _sigmoid_gate(assembly: Assembly, each: SigmoidGate) -> None:
    assembly.append("sigmoid_gate", each.out, x=place_of(each.x), y=place_of(each.gate))


def _all_reduce(assembly: Assembly, each: AllReduceOp) -> None:
    wire = lib.WIRES.index(each.wire)
    assembly.append("all_reduce", each.out, x=place_of(each.x), function=wire)


def _all_reduce_add(assembly: Assembly, each: AllReduceAdd) -> None:
    wire = lib.WIRES.index(each.wire)
    x = place_of(each.x)
    assembly.append("all_reduce", each.out, x=x, flags=lib.RESIDUAL, function=wire)
    if each.norm is not None:
        norm, eps = assembly.vector(each.norm), each.eps
        assembly.append("norm", each.normed, x=place_of(each.out), norm=norm, eps=eps)


_MAKERS: dict[type[Instruction], Callable[[Assembly, Any], None]] = {
    EmbedOp: _embed,
    ReadHiddenOp: _read_hidden,
    LinearOp: _linear,
    AttentionOp: _attend,
    CrossAttentionOp: _cross_attend,
    AddGatedOp: _add_gated,
    GatherOp: _gather,
    SwiGLUOp: _swiglu,
    NormHeads: _norm_heads,
    NormOp: _norm,
    Elementwise: _elementwise,
    SigmoidGate: _sigmoid_gate,
    AllReduceOp: _all_reduce,
    AllReduceAdd: _all_reduce_add,
}
