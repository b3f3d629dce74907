"""The plan of a lowered graph: instructions, the places they read and write, what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny import QWEN2, check_golden, lowered, precision_of, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.program.instructions import (
    LOGITS,
    AttentionOp,
    BufferView,
    EmbedOp,
    GatherOp,
    KernelProgram,
    LinearOp,
    SwiGLUOp,
)
from tilewright.errors import CompileError

MIXED = "0: {wqkv: bfp4}, *.q_proj: {wqkv: bf16}"
UNMERGED = "*.q_proj: {wqkv: bfp4}, *.up_proj: {ff1_3: bfp4}"


def plan_of(layers: str = "", **changes: Any) -> KernelProgram:
    precision = precision_of("bfp8", layers=layers)
    return lower_to_program(lowered(tiny_model(**changes), target="cuda", precision=precision)[0])


def text_of(plan: KernelProgram) -> str:
    """The buffers, then a line an instruction."""

    def place(found: BufferView) -> str:
        name = f"{plan.buffers[found.buffer].role}{found.buffer}"
        end = found.first + found.width
        return f"{name}[{found.first}:{end}" + (f" of {found.stride}]" if found.stride else "]")

    def weight(recipe: WeightRecipe) -> str:
        names = " | ".join(name.removesuffix(".weight") for name in recipe.names)
        return f"{names} {recipe.format or 'as it is'} {list(recipe.shape)}"

    def lines() -> Iterator[str]:
        for index, buffer in enumerate(plan.buffers):
            yield f"{buffer.role}{index}: {buffer.width} columns"
        for each in plan.instructions:
            out = place(each.out)
            if isinstance(each, EmbedOp):
                yield f"{out} = embed {weight(each.table)}"
            elif isinstance(each, LinearOp):
                x = place(each.x) if each.norm is None else f"norm({place(each.x)}, {each.eps:g})"
                epilogue = "SwiGLU of " if each.swiglu else ""
                bias = "" if each.bias is None else " + bias"
                sign = "+=" if each.residual else "="
                yield f"{out} {sign} {epilogue}{x} x {weight(each.weight)}{bias} ({each.group})"
            elif isinstance(each, AttentionOp):
                state = f"{each.state.name} {list(each.state.shape)}"
                yield f"{out} = attend {place(each.qkv)}, {each.num_heads} heads, {state}"
            elif isinstance(each, GatherOp):
                yield f"{out} = rows of {place(each.x)}"
            else:
                yield f"{out} = SwiGLU of {place(each.gate)}, {place(each.up)}"

    return "\n".join(lines()) + "\n"


def test_the_golden_plan() -> None:
    check_golden("cuda/plan.txt", text_of(plan_of()))


def test_the_golden_plan_where_formats_keep_products_apart() -> None:
    check_golden("cuda/plan_unmerged.txt", text_of(plan_of(UNMERGED, num_layers=1)))


@pytest.mark.parametrize(("changes", "num_layers"), [({}, 1), ({}, 3), (QWEN2, 2)])
def test_five_instructions_a_layer(changes: dict[str, Any], num_layers: int) -> None:
    kinds = [type(each) for each in plan_of(num_layers=num_layers, **changes).instructions]
    layer = [LinearOp, AttentionOp, LinearOp, LinearOp, LinearOp]
    assert kinds == [EmbedOp, *layer * num_layers, GatherOp, LinearOp]


def test_apart_are_eight_instructions_a_layer() -> None:
    """Three products before attention, two before SwiGLU; norms are in each of them."""
    plan = plan_of(UNMERGED, num_layers=1)
    kinds = [type(each) for each in plan.instructions]
    before, mlp = [LinearOp] * 3 + [AttentionOp, LinearOp], [LinearOp, LinearOp, SwiGLUOp, LinearOp]
    assert kinds == [EmbedOp, *before, *mlp, GatherOp, LinearOp]
    q, k, v, _, gate, up, *_ = plan.products
    assert all(each.norm is not None for each in (q, k, v, gate, up))
    assert [each.weight.format for each in (q, k, v, gate, up)] == [
        *("bfp4", "bfp8", "bfp8", "bfp8", "bfp4")
    ]


def test_parts_of_attention_are_columns_side_by_side() -> None:
    q, k, v, *_ = plan_of(UNMERGED, num_layers=1).products
    (attend,) = (
        each
        for each in plan_of(UNMERGED, num_layers=1).instructions
        if isinstance(each, AttentionOp)
    )
    assert [(each.out.first, each.out.width, each.out.stride) for each in (q, k, v)] == [
        *((0, 64, 128), (64, 32, 128), (96, 32, 128))
    ]
    assert {each.out.buffer for each in (q, k, v)} == {attend.qkv.buffer}
    assert (attend.qkv.first, attend.qkv.width, attend.qkv.stride) == (0, 128, 0)


def test_layers_of_other_formats_share_a_buffer_of_their_own_width() -> None:
    plan = plan_of(MIXED)
    qkv = [each.qkv for each in plan.instructions if isinstance(each, AttentionOp)]
    assert len(qkv) == 2 and len({place.width for place in qkv}) == 1
    formats = [each.weight.format for each in plan.products if each.group == "wqkv"]
    assert sorted(formats) == ["bf16", "bf16", "bfp4", "bfp4", "bfp8", "bfp8"]


@pytest.mark.parametrize("layers", ["", MIXED, UNMERGED])
def test_no_value_is_overwritten_while_it_is_wanted(layers: str) -> None:
    """Each reader finds what its writer left: the plan is run on names instead of numbers."""
    plan = plan_of(layers, attention_bias=True, mlp_bias=True)
    held: dict[tuple[int, int], int] = {}

    def columns(place: BufferView) -> list[tuple[int, int]]:
        assert place.first + place.width <= plan.buffers[place.buffer].width
        return [(place.buffer, place.first + at) for at in range(place.width)]

    def read(place: BufferView) -> set[int]:
        return {held[column] for column in columns(place)}

    sources: list[list[set[int]]] = []
    for number, each in enumerate(plan.instructions):
        parts = {
            EmbedOp: [],
            LinearOp: [getattr(each, "x", None)],
            AttentionOp: [getattr(each, "qkv", None)],
            GatherOp: [getattr(each, "x", None)],
            SwiGLUOp: [getattr(each, "gate", None), getattr(each, "up", None)],
        }[type(each)]
        found = [read(part) for part in parts if part is not None]
        if isinstance(each, LinearOp) and each.residual:
            found.append(read(each.out))
        sources.append(found)
        assert (
            isinstance(each, LinearOp)
            or not found
            or each.out.buffer not in {part.buffer for part in parts if part is not None}
        ), "only sums are made in place"
        for column in columns(each.out):
            held[column] = number
    stream = 0  # the instruction that wrote the stream last
    for number, each in enumerate(plan.instructions):
        if isinstance(each, GatherOp):
            assert sources[number] == [{stream}]
            stream = number
        elif isinstance(each, LinearOp) and each.residual:
            assert sources[number][-1] == {stream}
            stream = number
        elif isinstance(each, LinearOp):
            assert sources[number] == [{stream}], "norms read the stream"
        elif isinstance(each, SwiGLUOp):
            assert sources[number] == [{number - 2}, {number - 1}]
        elif isinstance(each, AttentionOp):
            assert max(sources[number][0]) == number - 1
            assert len(sources[number][0]) == (1 if not layers else len(sources[number][0]))
    assert plan.buffers[plan.instructions[-1].out.buffer].role == LOGITS


def test_buffers_do_not_grow_with_the_layers() -> None:
    assert plan_of(num_layers=1).buffers == plan_of(num_layers=3).buffers


def test_an_operator_without_a_kernel_is_named() -> None:
    graph_module, _ = lowered(tiny_model(num_layers=1), target="cuda", precision=precision_of())
    node = find_calls(graph_module.graph, ops.fused_linear)[1]
    node.target = torch.ops.aten.mm.default
    with pytest.raises(CompileError) as caught:
        lower_to_program(graph_module)
    message = str(caught.value)
    assert message.startswith("model.layers.0.self_attn.o_proj: aten.mm.default has no kernel")
    assert "allowed: --target reference, or cpu" in message and "\n" not in message


def test_a_residual_that_is_wanted_again_is_named() -> None:
    """It would be overwritten by the sum."""
    graph_module, _ = lowered(tiny_model(num_layers=1), target="cuda", precision=precision_of())
    calls = find_calls(graph_module.graph, ops.fused_linear)
    first, last = calls[1], calls[3]
    last.update_arg(5, first.args[5])
    with pytest.raises(CompileError, match=r"o_proj: its residual is read again later"):
        lower_to_program(graph_module)
