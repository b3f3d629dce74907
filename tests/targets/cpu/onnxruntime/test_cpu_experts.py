"""Experts on the CPU: which operator, which values, which arithmetic, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.fx import Graph

from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.models.test_qwen3_moe import make
from tests.tiny import compiled, lowered, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.info import INPUT, WEIGHT, Compute, NodeInfo, set_info
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.contract.record import Meaning
from tilewright.compiler.targets.cpu.onnxruntime.codes import expert_codes, signed_codes
from tilewright.compiler.targets.cpu.onnxruntime.emit_experts import emit_experts
from tilewright.compiler.targets.cpu.onnxruntime.emitter import Emitter
from tilewright.compiler.targets.cpu.onnxruntime.model_file import write_model
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    NATIVE_BITS,
    ExpertLayout,
    expert_layout,
)
from tilewright.compiler.targets.cpu.onnxruntime.weights import WeightFile
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CompileError

E, INNER, C, K = 5, 40, 64, 2
NAMES = ("gate", "up", "down")
SHAPES = {"gate": (E, INNER, C), "up": (E, INNER, C), "down": (E, C, INNER)}
PAIRS = [(name, name) for name in NATIVE_BITS]
PAIRS += [("bfp4", "bfp8"), ("bfp8", "q80"), ("q40", "bfp8"), ("q80", "q40")]


def weights_of(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(SHAPES[name], generator=generator) for name in NAMES}


def layout_of(*formats: str) -> ExpertLayout:
    recipes = [WeightRecipe((), (1, 1), name) for name in formats]
    infos = [NodeInfo(recipe=each, compute=Compute("hifi2", "hifi2")) for each in recipes]
    found = expert_layout(infos, exact=False)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_codes_and_scales_are_the_formats_values(name: str, other: str) -> None:
    """Also where codes are wider, or blocks shorter, than the format's own."""
    layout = layout_of(name, other)
    dense = torch.randn(3, 7, 40) * torch.exp2(torch.randint(-9, 9, (3, 7, 1)).float())
    codes, scales = expert_codes(
        signed_codes(dense.flatten(0, 1), name), layout, num_experts=len(dense), num_rows=9
    )
    width = -(-40 // layout.block) * layout.block
    assert codes.shape == (3, 9, width * layout.bits // 8) and codes.dtype == np.uint8
    assert scales.shape == (3, 9, width // layout.block)
    if layout.bits == 4:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(3, 9, -1)
    signed = codes.astype(np.float32) - (1 << (layout.bits - 1))
    values = signed.reshape(3, 9, -1, layout.block) * scales[..., None]
    expected = np.zeros((3, 9, width), dtype=np.float32)
    expected[:, :7, :40] = get_format(name).round_trip(dense, axis=-1).numpy()
    assert np.array_equal(values.reshape(expected.shape), expected)


def run_block(
    weights: dict[str, Tensor],
    formats: tuple[str, str],
    x: Tensor,
    logits: Tensor,
    *,
    layout: ExpertLayout | None,
    folder: Path,
    renormalise: bool,
) -> Tensor:
    """Through the emitter, on a graph of one block."""
    graph = Graph()
    asked = "hifi4" if layout is None else "hifi2"
    nodes = [graph.placeholder(name) for name in ("x", "logits", *NAMES)]
    for node in nodes[:2]:
        set_info(node, role=INPUT)
    for node, name in zip(nodes[2:], NAMES, strict=True):
        shape, form = SHAPES[name], formats[name == "down"]
        segment = Segment(name, shape[0] * shape[1])
        recipe = WeightRecipe((segment,), shape, form)
        set_info(node, role=WEIGHT, recipe=recipe, compute=Compute(asked, asked))
    block = graph.call_function(ops.experts.overload, (*nodes, K, renormalise))
    file = WeightFile(folder / "weights.bin", weights.__getitem__)
    emitter = Emitter(file, exact=False, max_context=8, vocab_size=1)
    emit_experts(emitter, block)
    file.close()
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", C]),
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", "S", E]),
    ]
    output = helper.make_tensor_value_info(block.name, TensorProto.FLOAT, None)
    initializers = [*emitter._constants.values(), *file.initializers]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph(emitter._nodes, "block", inputs, [output], initializers),
        ir_version=10,
        opset_imports=imports,
    )
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": x.numpy()[None], "logits": logits.numpy()[None]})
    return torch.from_numpy(found)[0]


def int8_rows(x: Tensor, block: int) -> Tensor:
    """Rounded to 255 steps by block, as the operator rounds what it multiplies by blocks."""
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    rounded = (blocks / scale.clamp_min(1e-30)).round() * scale
    return rounded.flatten(-2)[..., : x.shape[-1]]


def emulated(
    weights: dict[str, Tensor], x: Tensor, logits: Tensor, *, block: int, renormalise: bool
) -> Tensor:
    """The block with int8 activations, expert by expert."""
    shares, chosen = ops.router.reference(logits, K, renormalise)
    x = int8_rows(x, block)
    gate = ops.expert_linear.reference(x, weights["gate"], chosen)
    inner = int8_rows(
        torch.nn.functional.silu(gate) * ops.expert_linear.reference(x, weights["up"], chosen),
        block,
    )
    out: Tensor = ops.expert_linear.reference(inner, weights["down"], chosen, shares)
    return out


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_blocks_are_multiplied_by_int8_activations(
    name: str, other: str, renormalise: bool, tmp_path: Path
) -> None:
    weights, x, logits = weights_of(), torch.randn(9, C), torch.randn(9, E)
    layout = layout_of(name, other)
    rest: dict[str, Any] = {"folder": tmp_path, "renormalise": renormalise}
    got = run_block(weights, (name, other), x, logits, layout=layout, **rest)
    values = {
        key: get_format(other if key == "down" else name).round_trip(each, axis=-1)
        for key, each in weights.items()
    }
    block = layout.block
    expected = emulated(values, x, logits, block=block, renormalise=renormalise)
    in_float = ops.experts.reference(x, logits, *values.values(), K, renormalise)
    assert expected.std() > 0.1
    near = (got - expected).abs() < 1e-4 * expected.std()
    assert near.float().mean() > 0.9, "but for values at the middle between two steps"
    torch.testing.assert_close(got, expected, atol=0.05 * float(expected.std()), rtol=0)
    assert (got - in_float).abs().max() > 1e-3 * expected.std()


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bf16", "bfp8"])
def test_everything_else_is_multiplied_in_float(
    name: str, renormalise: bool, tmp_path: Path
) -> None:
    weights, x, logits = weights_of(), torch.randn(9, C), torch.randn(9, E)
    rest: dict[str, Any] = {"folder": tmp_path, "renormalise": renormalise}
    got = run_block(weights, (name, name), x, logits, layout=None, **rest)
    values = [get_format(name).round_trip(each, axis=-1) for each in weights.values()]
    expected = ops.experts.reference(x, logits, *values, K, renormalise)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("name", ["fp32", "bfp8"])
def test_of_equal_experts_the_first_are_chosen(
    name: str, renormalise: bool, tmp_path: Path
) -> None:
    """As the router does, in both operators."""
    weights, x = weights_of(), torch.randn(4, C)
    logits = torch.tensor([[0.0] * E, [1, 2, 2, 2, 0], [0, 0, 1, 0, 1], [3, 1, 1, 1, 1]])
    layout = None if name == "fp32" else layout_of(name, name)
    rest: dict[str, Any] = {"folder": tmp_path, "renormalise": renormalise}
    got = run_block(weights, (name, name), x, logits, layout=layout, **rest)
    expected = ops.experts.reference(x, logits, *weights.values(), K, renormalise)
    torch.testing.assert_close(got, expected, atol=0.1 * float(expected.std()), rtol=0)


def test_a_row_does_not_depend_on_its_batch(tmp_path: Path) -> None:
    weights, x, logits = weights_of(), torch.randn(33, C), torch.randn(33, E)
    rest: dict[str, Any] = {"folder": tmp_path, "renormalise": True, "layout": layout_of("bfp8")}
    together = run_block(weights, ("bfp8", "bfp8"), x, logits, **rest)
    for row in (0, 17):
        at = slice(row, row + 1)
        alone = run_block(weights, ("bfp8", "bfp8"), x[at], logits[at], **rest)
        assert torch.equal(alone[0], together[row])


FAST = CompileOptions(max_batch=1, max_context=32)
INT8, FLOAT = Meaning("emulated", "int8 activations"), Meaning("not honoured", "fp32")


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        ({}, INT8),
        ({"ff2": "bfp4", "li_ff2": "lofi"}, INT8),
        ({"ff1_3": "q40", "li_ff1_3": "lofi"}, INT8),
        ({"li_ff2": "hifi4"}, FLOAT),
        ({"ff1_3": "bf16"}, FLOAT),
    ],
    ids=str,
)
def test_the_contract_says_what_the_block_does(
    changes: dict[str, str], meaning: Meaning, tmp_path: Path
) -> None:
    """In float arithmetic where one of the three products is; and so runs the model."""
    model = make()
    graph_module, _ = lowered(model, precision=precision_of("bfp8", "hifi2", **changes))
    found = get_target("cpu").contract(graph_module, FAST).entries
    fields = ("li_ff1_3 prefill", "li_ff1_3 decode", "li_ff2 prefill", "li_ff2 decode")
    expected = dict.fromkeys(fields, meaning)
    assert {e.field: e.meaning for e in found if e.field in fields} == expected
    write_model(graph_module, weight_source(model, 32), tmp_path, FAST, lambda *_: None)
    proto = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    kinds = {node.op_type for node in proto.graph.node}
    assert ("QMoE" in kinds, "MoE" in kinds) == (meaning is INT8, meaning is FLOAT)


@pytest.mark.parametrize("make", [make, make_hybrid])
def test_blocks_run_in_any_chunks(make: Any) -> None:
    """Mixed widths and blocks, and experts whose inner channels are no whole blocks."""
    model, tokens = make(), random_tokens(20)
    precision = precision_of("bfp8", "hifi2", ff1_3="bfp4", li_ff1_3="lofi")
    executable = compiled(model, "cpu", precision=precision, compute="fast")
    whole = prefill(executable, tokens)
    assert whole.std() > 0.1
    chunked = prefill(executable, tokens, [7, 1, 1, 5])
    torch.testing.assert_close(chunked, whole, atol=1e-4, rtol=1e-4)
    executable.close()


def test_channels_that_are_no_whole_blocks_are_refused() -> None:
    sizes = {"num_experts": 6, "experts_per_token": 2, "expert_size": 24, "hidden_size": 40}
    model = tiny_model(model_type="qwen3_moe", **sizes)
    precision = precision_of("bfp8", "hifi2")
    message = r"0\.mlp\.experts: .* 40 channels in blocks; allowed: multiples of 16"
    with pytest.raises(CompileError, match=message):
        compiled(model, "cpu", precision=precision, compute="fast")
    compiled(model, "cpu", precision=precision).close()
