"""The plan of models with experts and with linear attention: instructions and their places."""

from __future__ import annotations

import pytest

from tests.models import test_qwen3_5_moe, test_qwen3_moe
from tests.models.test_qwen3_5_moe import SIZES
from tests.tiny import lowered, precision_of, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    RESIDUAL,
    AttentionOp,
    Convolve,
    DeltaRuleOp,
    EmbedOp,
    ExpertLinearOp,
    ExpertSum,
    GatherOp,
    KernelProgram,
    LinearOp,
    NormHeads,
    NormOp,
    SigmoidGate,
    SwiGLUOp,
    TopKRouteOp,
)
from tilewright.errors import CompileError
from tilewright.models.config import DeltaShape

EXPERTS = [NormOp, LinearOp, TopKRouteOp, ExpertLinearOp]
SHARED = [LinearOp, LinearOp, ExpertSum]
DELTA = [LinearOp, LinearOp, DeltaRuleOp, LinearOp]
FULL = [LinearOp, NormHeads, AttentionOp, SigmoidGate, LinearOp]


def plan_of(model: object, layers: str = "") -> KernelProgram:
    precision = precision_of("bfp8", layers=layers)
    return lower_to_program(lowered(model, target="cuda", precision=precision)[0])  # type: ignore[arg-type]


def kinds(plan: KernelProgram) -> list[type]:
    return [type(each) for each in plan.instructions]


def test_a_layer_of_experts() -> None:
    plan = plan_of(test_qwen3_moe.make())
    layer = [LinearOp, NormHeads, AttentionOp, LinearOp, *EXPERTS, ExpertSum]
    assert kinds(plan) == [EmbedOp, *layer * 2, GatherOp, LinearOp]
    total = plan.instructions[9]
    assert isinstance(total, ExpertSum) and total.residual and total.shared is None
    assert plan.buffers[total.out.buffer].role == RESIDUAL


def test_layers_of_a_hybrid() -> None:
    plan = plan_of(test_qwen3_5_moe.make())
    block = [*EXPERTS, *SHARED]
    assert kinds(plan) == [EmbedOp, *[*DELTA, *block] * 3, *FULL, *block, GatherOp, LinearOp]
    names = [state.name.removeprefix("model.layers.") for state in plan.sequence_states]
    ends = ("linear_attn.conv1d.window", "linear_attn.memory")
    assert names == [f"{layer}.{end}" for layer in range(3) for end in ends]
    assert [state.name for state in plan.states] == ["model.layers.3.self_attn.kv"]


def test_where_gate_and_up_differ_they_are_products_of_their_own() -> None:
    layers = "*.experts.up_proj: {experts_ff1_3: bfp4}"
    plan = plan_of(test_qwen3_moe.make(), layers)
    (start,) = [i for i, each in enumerate(plan.instructions) if isinstance(each, TopKRouteOp)][:1]
    assert kinds(plan)[start + 1 : start + 5] == [
        ExpertLinearOp,
        ExpertLinearOp,
        SwiGLUOp,
        ExpertSum,
    ]
    gate, up, swiglu, total = plan.instructions[start + 1 : start + 5]
    assert isinstance(swiglu, SwiGLUOp) and isinstance(total, ExpertSum)
    assert isinstance(gate, ExpertLinearOp) and isinstance(up, ExpertLinearOp)
    assert (swiglu.gate, swiglu.up, swiglu.out) == (gate.out, up.out, total.x)
    assert plan.buffers[total.x.buffer].role == OPERAND and total.x.width == 2 * 24


def test_attention_reads_columns_of_a_wider_product() -> None:
    """With norms of its heads they go to a place of their own; both are then free."""
    plan = plan_of(test_qwen3_5_moe.make())
    (norm,) = (each for each in plan.instructions if isinstance(each, NormHeads))
    (attend,) = (each for each in plan.instructions if isinstance(each, AttentionOp))
    (gate,) = (each for each in plan.instructions if isinstance(each, SigmoidGate))
    assert (norm.qkv.first, norm.qkv.width, norm.qkv.stride) == (0, 128, 192)
    assert (norm.out.width, norm.out.stride) == (128, 0) and attend.qkv == norm.out
    assert (gate.gate.first, gate.gate.width, gate.gate.stride) == (128, 64, 192)
    assert norm.out.buffer != norm.qkv.buffer == gate.gate.buffer

    graph_module, _ = lowered(test_qwen3_5_moe.make(), target="cuda", precision=precision_of())
    (call,) = find_calls(graph_module.graph, ops.rope_attention_step)
    given = ops.RopeAttentionArguments.of(call.args)
    call.args = given._replace(q_norm=None, k_norm=None, norm_eps=0.0).given()
    bare = lower_to_program(graph_module)
    (attend,) = (each for each in bare.instructions if isinstance(each, AttentionOp))
    assert (attend.qkv.first, attend.qkv.width, attend.qkv.stride) == (0, 128, 192)


def test_a_delta_rule_has_its_convolution() -> None:
    """It is done behind the products of the gates: what it reads is kept until then."""
    layers = "*.linear_attn.in_proj_z: {delta_in: bf16}"  # its format is not that of q, k and v
    for count, given in ((3, layers), (2, "")):
        plan = plan_of(test_qwen3_5_moe.make(), given)
        (start, *_) = (
            i for i, each in enumerate(plan.instructions) if isinstance(each, DeltaRuleOp)
        )
        rule, before = plan.instructions[start], plan.instructions[start - count : start]
        assert [type(each) for each in before] == [LinearOp] * count
        assert isinstance(rule, DeltaRuleOp) and rule.convolve is not None
        convolve = rule.convolve
        assert rule.qkv == convolve.out and convolve.state.name.endswith("conv1d.window")
        read = [convolve.x, rule.a, rule.b, rule.z]
        written = [each.out for each in before if isinstance(each, LinearOp)]
        assert {each.buffer for each in read} == {each.buffer for each in written}
        assert len({each.buffer for each in written}) == count
        assert convolve.out.buffer not in {each.buffer for each in written}
        assert plan.buffers[rule.out.buffer].role == OPERAND


def test_a_convolution_that_something_else_reads_is_an_instruction() -> None:
    graph_module, _ = lowered(test_qwen3_5_moe.make(), target="cuda", precision=precision_of())
    graph = graph_module.graph
    convolution, *_ = find_calls(graph, ops.causal_conv1d_step)
    _, other, *_ = find_calls(graph, ops.delta_rule_norm_step)
    other.replace_input_with(other.args[0], convolution)  # type: ignore[arg-type]
    plan = lower_to_program(graph_module)
    rules = [each for each in plan.instructions if isinstance(each, DeltaRuleOp)]
    convolves = [each for each in plan.instructions if isinstance(each, Convolve)]
    assert [each.convolve is None for each in rules] == [True, True, False]
    assert len(convolves) == 2 and rules[0].qkv == rules[1].qkv == convolves[0].out
    first = kinds(plan).index(Convolve)
    assert kinds(plan)[first + 1] is DeltaRuleOp
    names = [state.name for state in plan.sequence_states]
    assert len(names) == len(set(names)) == 6


def test_buffers_do_not_grow_with_the_layers() -> None:
    def plan(num_layers: int) -> KernelProgram:
        changes = {"num_layers": num_layers, "linear_layers": (True, False) * (num_layers // 2)}
        return plan_of(tiny_model(model_type="qwen3_5_moe", **{**SIZES, **changes}))

    assert plan(2).buffers == plan(4).buffers


def test_experts_are_those_of_the_last_router() -> None:
    graph_module, _ = lowered(test_qwen3_moe.make(), target="cuda", precision=precision_of())
    first, *_, last = find_calls(graph_module.graph, ops.fused_expert_linear)
    given = ops.FusedExpertArguments.of(last.args)
    last.args = tuple(given._replace(experts=first.args[2]))
    with pytest.raises(AssertionError, match="another's experts"):
        lower_to_program(graph_module)


def test_heads_that_the_delta_rule_s_kernels_do_not_take_are_named() -> None:
    delta = {"delta": DeltaShape(1, 1, 160, 16)}
    model = tiny_model(model_type="qwen3_5_moe", **{**SIZES, **delta})
    words = (
        r"layers\.0\.linear_attn: keys of 160 and values of 16 channels on target cuda; "
        "allowed: up to 128, or --target reference, or cpu"
    )
    with pytest.raises(CompileError, match=words):
        plan_of(model)


def test_a_delta_rule_without_its_norm_has_no_kernel() -> None:
    graph_module, _ = lowered(
        test_qwen3_5_moe.make(), target="cuda", precision=precision_of(), until="fuse_delta_norm"
    )
    assert info(find_calls(graph_module.graph, ops.gated_delta_rule_step)[0]).fqn
    with pytest.raises(CompileError, match="has no kernel on target cuda"):
        lower_to_program(graph_module)
