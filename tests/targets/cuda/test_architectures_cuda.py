"""Every architecture that has more than Llama's operators computes on cuda what the reference does:
``ON_CUDA`` in its own test file is a small shape of it.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from tests.grids import grid, only
from tests.models.test_phi3 import longrope
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, EXACT, noise, on_cuda
from tests.targets.test_conformance import assert_near
from tests.tiny import (
    compiled,
    copy_slot,
    lowered,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    EmbedOp,
    GatherOp,
    KernelProgram,
    LinearOp,
    NormHeads,
)
from tilewright.errors import CompileError
from tilewright.models.architectures.table import model_types

SHAPES: dict[str, dict[str, Any]] = {
    model_type: module.ON_CUDA
    for model_type in model_types()
    if hasattr(module := importlib.import_module(f"tests.models.test_{model_type}"), "ON_CUDA")
}
SMALL = {"num_layers": 1, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1}
UNLIKE = ("gemma3_text", "qwen3_next")
"""Windows and norms after the mixer; experts, convolution and delta rule."""


def test_the_new_ones_are_there() -> None:
    assert {"mistral", "phi3", "qwen3"} <= SHAPES.keys()
    assert {"qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"} <= SHAPES.keys()


@pytest.mark.parametrize(
    ("model_type", "compute"), grid([(each,) for each in SHAPES], ["exact", "fast"])
)
def test_a_prompt_in_chunks_is_the_reference(model_type: str, compute: str) -> None:
    """The second chunk is a step of one token, as the ones after it."""
    changes = {"hidden_size": 16, **SMALL, **SHAPES[model_type]}
    model = tiny_model(std=0.2, model_type=model_type, **changes)
    tokens, precision = random_tokens(8), precision_of("bf16")
    expected = prefill(compiled(model, precision=precision), tokens)
    got = prefill(on_cuda(model, precision, compute), tokens, [6, 1])
    if compute == "exact":
        assert_near(got, expected, EXACT)
    else:
        assert 0 < noise(got, expected) < 2 * BF16_NOISE


@pytest.mark.parametrize("model_type", only(UNLIKE, SHAPES))
def test_rows_of_different_lengths_decode_as_each_does_alone(model_type: str) -> None:
    changes = {"hidden_size": 16, **SMALL, **SHAPES[model_type]}
    model = tiny_model(std=0.2, model_type=model_type, **changes)
    executable = on_cuda(model, precision_of("bf16"), "exact")
    lengths = (7, 2)
    handles = [take_slot(executable, 20) for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        step(executable, [(handle, random_tokens(length, seed=length), 0)])
    entries = [(handle, [3], length) for handle, length in zip(handles, lengths, strict=True)]
    copies = [copy_slot(executable, handle, length) for handle, _, length in entries]
    alone = [
        step(executable, [(copy, *entry[1:])]) for copy, entry in zip(copies, entries, strict=True)
    ]
    together = step(executable, entries[::-1])
    for row, one in zip(together, alone[::-1], strict=True):
        assert_near(row, one[0], EXACT)


@pytest.mark.parametrize("model_type", only(UNLIKE, SHAPES))
def test_buffers_do_not_grow_with_the_layers(model_type: str) -> None:
    """As the release of every value, pieces of products too, and what is made in place."""

    def plan(times: int) -> KernelProgram:
        changes = {"num_layers": 1, **SHAPES[model_type]}
        changes["num_layers"] *= times
        for name in {"windows", "linear_layers"} & changes.keys():
            changes[name] = tuple(changes[name]) * times
        model = tiny_model(model_type=model_type, **changes)
        return lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])

    few, many = plan(1).buffers, plan(3).buffers
    assert [each.role for each in few] == [each.role for each in many]
    assert max(each.width for each in few) == max(each.width for each in many)


def test_heads_are_normed_between_their_product_and_attention() -> None:
    model = tiny_model(model_type="qwen3", num_layers=2)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
    layer = [LinearOp, NormHeads, AttentionOp, LinearOp, LinearOp, LinearOp]
    assert [type(each) for each in plan.instructions] == [EmbedOp, *layer * 2, GatherOp, LinearOp]
    norm, attend = plan.instructions[2:4]
    assert isinstance(norm, NormHeads) and isinstance(attend, AttentionOp)
    assert norm.out == attend.qkv and (norm.num_heads, norm.eps) == (4, 1e-5)
    assert norm.q_norm.names == ("model.layers.0.self_attn.q_norm.weight",)


def test_a_rotation_of_some_channels_with_a_factor_has_no_kernel() -> None:
    model = tiny_model(rope=longrope(4, num_rotated=8))
    graph_module, _ = lowered(model, target="cuda", precision=precision_of())
    words = "a rotation of some channels with a factor has no kernel on target cuda"
    with pytest.raises(CompileError, match=words) as caught:
        lower_to_program(graph_module)
    assert "allowed: --target reference, or cpu" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_soft_cap_has_no_kernel() -> None:
    graph_module, _ = lowered(tiny_model(), target="cuda", precision=precision_of())
    attention = find_calls(graph_module.graph, ops.rope_attention_step)[1]
    given = ops.RopeAttentionArguments.of(attention.args)._replace(soft_cap=30.0)
    attention.args = given.given()
    words = r"layers\.1\.self_attn: a soft cap on scores has no kernel on target cuda"
    with pytest.raises(CompileError, match=words):
        lower_to_program(graph_module)
