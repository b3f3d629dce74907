"""What a graph becomes: collectives where sums are partial, formats by op, and what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.targets.tenstorrent.boards import OPTIONS, board, board_precision, programs
from tests.tiny import QWEN2, lowered, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    Add,
    AllGather,
    DeviceProgram,
    Matmul,
    ReduceScatter,
    RmsNorm,
    Rotate,
    TtAllReduce,
    TtAttention,
    TtEmbedding,
    TtInstruction,
    TtSwiGLU,
    UpdateCache,
    class_name,
)
from tilewright.errors import CompileError

COLLECTIVES = (AllGather, TtAllReduce, ReduceScatter)


def counts(program: DeviceProgram) -> Counter[str]:
    return Counter(class_name(each) for each in program.instructions)


def of(program: DeviceProgram, kind: type[TtInstruction]) -> list[Any]:
    return [each for each in program.instructions if isinstance(each, kind)]


def test_a_layer_on_one_chip() -> None:
    """Nothing is sent; merged q, k and v, and gate and up apart."""
    one, two = (programs(tiny_model(num_layers=n))[1] for n in (1, 2))
    assert counts(two) - counts(one) == Counter(
        RmsNorm=2,
        Matmul=5,
        CreateHeads=1,
        Rotate=2,
        UpdateCache=2,
        Attention=1,
        ConcatHeads=1,
        SwiGLU=1,
        Add=2,
    )
    groups = [each.group for each in of(one, Matmul)]
    assert groups == ["wqkv", "wo", "ff1_3", "ff1_3", "ff2", "lm_head"]


@pytest.mark.parametrize(
    ("mesh", "a_layer", "outside"),
    [
        (Mesh(2), {"ReduceScatter": 2, "AllGather": 2}, {"AllGather": 1}),
        (Mesh(4), {"AllReduce": 2}, {"AllGather": 1}),  # two tiles are not shared by four
        (Mesh(4, 2), {"AllReduce": 5}, {"AllReduce": 1, "AllGather": 1}),
    ],
)
def test_collectives(mesh: Mesh, a_layer: dict[str, int], outside: dict[str, int]) -> None:
    """One behind each second product of a block; on two axes one behind each product."""
    for program in programs(tiny_model(num_layers=3, hidden_size=64), mesh):
        found = Counter(
            class_name(each)
            for each in program.instructions
            if isinstance(each, COLLECTIVES) and each.layer == 1
        )
        assert found == a_layer
        head = [each for each in program.instructions if each.layer is None]
        assert Counter(class_name(e) for e in head if isinstance(e, COLLECTIVES)) == outside


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2), Mesh(4), Mesh(4, 2)])
def test_every_partial_sum_is_added_before_it_is_used(mesh: Mesh) -> None:
    for program in programs(tiny_model(hidden_size=64), mesh):
        made = set(program.inputs)
        for each in program.instructions:
            named = vars_of(each)
            read = [value for name, value in named.items() if name in ("x", "y", "q", "gate", "up")]
            if not isinstance(each, TtAllReduce | ReduceScatter):
                assert not any(value.partial for value in read)
            assert all(value in made for value in read)
            made |= {value for name, value in named.items() if name in ("out", "k", "v")}
        assert not program.instructions[-1].out.over
        assert program.instructions[-1].out.columns >= program.vocab_size == 61


def vars_of(instruction: TtInstruction) -> dict[str, Any]:
    names = [name for kind in type(instruction).__mro__ for name in getattr(kind, "__slots__", ())]
    return {name: getattr(instruction, name) for name in names}


def test_sizes_follow_the_step() -> None:
    options = CompileOptions(max_batch=5, max_context=96)
    prefill, decode = programs(tiny_model(), options=options)
    assert (prefill.phase, prefill.batch, prefill.length, prefill.context) == ("prefill", 1, 96, 96)
    assert (decode.phase, decode.batch, decode.length, decode.context) == ("decode", 5, 1, 96)
    assert {each.out.rows for each in of(prefill, Add)} == {96}
    assert {each.out.rows for each in of(decode, Add)} == {5}
    assert [program.instructions[-1].out.rows for program in (prefill, decode)] == [1, 5]


def formats(program: DeviceProgram) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for each in program.instructions:
        name = each.group if isinstance(each, Matmul) else class_name(each)
        found.setdefault(name, set()).add(each.out.format)
    return found


def test_formats_of_outputs_by_phase() -> None:
    prefill, decode = map(formats, programs(tiny_model(hidden_size=64), Mesh(2)))
    assert prefill["SwiGLU"] == decode["SwiGLU"] == {"bfp8"}
    for name in ("Rotate", "Attention", "wo", "ff1_3"):
        assert (prefill[name], decode[name]) == ({"bfp8"}, {"bf16"})
    for name in ("Embedding", "RmsNorm", "wqkv", "ff2", "Add", "lm_head"):
        assert prefill[name] == decode[name] == {"bf16"}
    assert (prefill["ReduceScatter"], decode["ReduceScatter"]) == ({"bfp8"}, {"bf16"})


def test_a_setting_of_activations_replaces_them() -> None:
    precision = board_precision(activation="bfp4", layers="0: {activation: bf16}")
    _, decode = programs(tiny_model(), precision=precision)
    by_layer: dict[int | None, set[str]] = {}
    for each in decode.instructions:
        if not isinstance(each, TtEmbedding | RmsNorm | UpdateCache):
            by_layer.setdefault(each.layer, set()).add(each.out.format)
    assert by_layer[0] == {"bf16"}
    assert by_layer[1] == {"bfp4"}


def test_fidelities_by_op_and_phase() -> None:
    precision = board_precision(
        "bfp8", "hifi2", li_qkv_decode="lofi", sdpa_prefill="hifi4", li_lm_head="hifi3"
    )
    prefill, decode = programs(tiny_model(), precision=precision)
    for program, qkv, sdpa in ((prefill, "hifi2", "hifi4"), (decode, "lofi", "hifi2")):
        found = {(each.group, each.compute.name) for each in of(program, Matmul)}
        others = {(group, "hifi2") for group in ("wo", "ff1_3", "ff2")}
        assert found == others | {("wqkv", qkv), ("lm_head", "hifi3")}
        assert {each.compute.name for each in of(program, TtAttention)} == {sdpa}
        small = [*of(program, RmsNorm), *of(program, Rotate)]
        assert {each.compute.name for each in small} == {"hifi4"}


def test_the_model_s_numbers_arrive() -> None:
    _, decode = programs(tiny_model(norm_eps=1e-3, head_dim=48))
    assert {each.eps for each in of(decode, RmsNorm)} == {1e-3}
    assert {each.width for each in of(decode, RmsNorm)} == {32}
    (attention, _) = of(decode, TtAttention)
    assert attention.scale == pytest.approx(48**-0.5)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 48)
    assert not any(each.interleaved for each in of(decode, Rotate))
    assert {(each.gate.columns, each.up.columns) for each in of(decode, TtSwiGLU)} == {(48, 48)}


def refusal(mesh: Mesh | None = None, precision: Any = None, **changes: Any) -> str:
    with pytest.raises(CompileError) as caught:
        programs(tiny_model(**changes), mesh, precision=precision)
    message = str(caught.value)
    assert "\n" not in message and "; " in message
    return message


@pytest.mark.parametrize("name", ["fp32", "q40", "q80", "bfp2", "fp16"])
def test_weights_in_other_formats_are_refused(name: str) -> None:
    message = refusal(precision=board_precision(ff2=name))
    assert message.startswith(f"model.layers.0.mlp.down_proj: weights in {name}; ")
    assert message.endswith("allowed: bf16, bfp8, bfp4")


@pytest.mark.parametrize("name", ["fp32", "bfp8", "q80"])
def test_tables_in_other_formats_are_refused(name: str) -> None:
    message = refusal(precision=board_precision(embedding=name))
    assert message.startswith(f"embedding in {name}")
    assert message.endswith("allowed on Tenstorrent boards: bf16")


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_caches_and_activations_in_other_formats_are_refused(name: str) -> None:
    assert f"self_attn.kv: {name}; " in refusal(precision=board_precision(kv_cache=name))
    assert f"activations in {name}; " in refusal(precision=board_precision(activation=name))


@pytest.mark.parametrize("rule", ["*.k_proj: {wqkv: bf16}", "*.v_proj: {li_qkv_decode: lofi}"])
def test_q_k_and_v_of_unequal_settings_are_refused(rule: str) -> None:
    message = refusal(precision=board_precision(layers=rule))
    assert message.startswith("model.layers.0.self_attn.q_proj: q, k and v are products of unequal")


def test_fewer_heads_than_chips_are_refused() -> None:
    assert refusal(Mesh(8)) == "4 query heads over 8 chips; allowed: meshes of at most 4"


def test_biases_behind_partial_sums_are_on_the_first_chip_and_refused_on_two_axes() -> None:
    _, decode = programs(tiny_model(output_bias=True), Mesh(2))
    (bias,) = {
        e.bias
        for e in decode.instructions
        if isinstance(e, Matmul) and e.group == "wo" and e.layer == 0
    }
    assert bias is not None and bias.out_split is not None
    starts = [[run.start for run in share] for share in bias.out_split.shares]
    assert starts == [[0], [None]] and bias.columns == 32
    message = refusal(Mesh(2, 2), output_bias=True)
    assert message.startswith("model.layers.0.self_attn.o_proj: a bias")
    assert "2x2" in message
    assert "q_proj" in refusal(Mesh(2, 2), **QWEN2)
    everywhere: dict[str, Any] = {**QWEN2, "output_bias": True, "mlp_bias": True}
    programs(tiny_model(**everywhere))


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"soft_cap": 30.0}, "a soft cap of scores")],
)
def test_attention_that_boards_have_not_is_refused(changes: dict[str, Any], what: str) -> None:
    graph_module, _ = lowered(tiny_model(), target="n150", precision=board_precision())
    node = find_calls(graph_module.graph, ops.rope_attention_step)[1]
    node.args = ops.RopeAttentionArguments.of(node.args)._replace(**changes).given()
    with pytest.raises(CompileError, match=rf"^model\.layers\.1\.self_attn: {what}: .*; allowed: "):
        board().programs(graph_module, OPTIONS)


def test_operators_without_an_instruction_are_refused() -> None:
    graph_module, _ = lowered(tiny_model(), target="n150", precision=board_precision())
    node = find_calls(graph_module.graph, ops.swiglu)[0]
    node.target = torch.ops.aten.mul.Tensor
    with pytest.raises(
        CompileError, match=r"mlp.*aten\.mul.* no instruction on target n150; allow"
    ):
        board().programs(graph_module, OPTIONS)
