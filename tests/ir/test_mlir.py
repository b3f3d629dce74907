"""Graphs as MLIR: run by torch-mlir's own just-in-time compiler, read back, small, refused well."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, run_graph, step_inputs, tiny_config, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.driver import weight_source
from tilewright.compiler.ir.info import INPUT
from tilewright.compiler.ir.mlir import DIALECTS, MlirModule, _export, emit_mlir
from tilewright.compiler.ir.recipe import load_dense
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ops import COLLECTIVES, OPERATORS
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.targets.pipeline import MATCH
from tilewright.compiler.tracer import trace
from tilewright.errors import CompileError, ConfigError
from tilewright.models import load_model

pytest.importorskip("torch_mlir")
ir = pytest.importorskip("torch_mlir.ir")

TO_LINALG = ("torch-backend-to-linalg-on-tensors-backend-pipeline",)
TO_LLVM = (
    "func.func(linalg-generalize-named-ops)",
    "one-shot-bufferize{bufferize-function-boundaries"
    " function-boundary-type-conversion=identity-layout-map}",
    "func.func(refback-munge-memref-copy,convert-linalg-to-loops,llvm-request-c-wrappers)",
    "expand-strided-metadata,lower-affine,convert-scf-to-cf,func.func(math-expand-ops)",
    "convert-math-to-llvm,convert-math-to-libm,convert-cf-to-llvm,convert-arith-to-llvm",
    "convert-index-to-llvm,finalize-memref-to-llvm,convert-func-to-llvm",
    "reconcile-unrealized-casts",
)


def parsed(text: str) -> Any:
    """The module, read and verified by a context that knows nothing else."""
    from torch_mlir.dialects import torch as torch_dialect

    context = ir.Context()
    torch_dialect.register_dialect(context)
    module = ir.Module.parse(text, context)
    assert module.operation.verify()
    return module


class Jit:
    """The module's function as machine code: NumPy arrays to one matrix of float32."""

    def __init__(self, emitted: MlirModule) -> None:
        from torch_mlir.execution_engine import ExecutionEngine
        from torch_mlir.passmanager import PassManager

        module = parsed(emitted.text)
        passes = (*TO_LINALG, *TO_LLVM) if emitted.dialect == "torch" else TO_LLVM
        with module.context:
            PassManager.parse(f"builtin.module({','.join(passes)})").run(module.operation)
            self.engine = ExecutionEngine(module, opt_level=0)

    def __call__(self, arrays: list[np.ndarray]) -> np.ndarray:
        from torch_mlir import runtime

        result = runtime.make_nd_memref_descriptor(2, ctypes.c_float)()
        described = [runtime.get_ranked_memref_descriptor(array) for array in arrays]
        values = [ctypes.pointer(ctypes.pointer(value)) for value in (result, *described)]
        self.engine.invoke("main", *values)
        return np.copy(runtime.ranked_memref_to_numpy(ctypes.pointer(result)))


def arrays_of(
    emitted: MlirModule, model: SimpleNamespace, inputs: dict[str, Tensor]
) -> list[np.ndarray]:
    """What the arguments say is to be fed."""
    get = weight_source(model)
    return [
        (inputs[entry.name] if entry.recipe is None else load_dense(entry.recipe, get)).numpy()
        for entry in emitted.arguments
    ]


def check_numbers(
    graph_module: Any, model: SimpleNamespace, emitted: MlirModule, *lengths: int
) -> None:
    """One machine code for all lengths agrees with the graph run eagerly in fp32."""
    jit = Jit(emitted)
    for length in lengths:
        inputs = step_inputs(length, seed=length)
        got = torch.from_numpy(jit(arrays_of(emitted, model, inputs)))
        torch.testing.assert_close(
            got, run_graph(graph_module, model, **inputs), atol=1e-5, rtol=1e-5
        )


def matched(model: SimpleNamespace) -> Any:
    return lowered(model, until="assign_precision", target="reference")[0]


def emit_dialects(graph_module: Any, **options: Any) -> dict[str, MlirModule]:
    """Emit a graph in every dialect. The graph is exported once."""
    exported: list[Any] = []

    def export(*given: Any) -> Any:
        if not exported:
            exported.append(_export(*given))
        return exported[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tilewright.compiler.ir.mlir._export", export)
        return {dialect: emit_mlir(graph_module, dialect, **options) for dialect in DIALECTS}


@pytest.fixture(scope="module")
def emitted_of() -> Callable[[str], MlirModule]:
    """The tiny model in a dialect, for any length, with its constants."""
    model = tiny_model()
    return emit_dialects(matched(model), constants=model.module.constants()).__getitem__


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_module_gives_the_eager_logits_at_every_length(
    emitted_of: Callable[[str], MlirModule], dialect: str
) -> None:
    model = tiny_model()
    check_numbers(matched(model), model, emitted_of(dialect), 1, 2, 19)


def test_a_fixed_length_and_constants_as_arguments() -> None:
    model = tiny_model(num_layers=1)
    emitted = emit_mlir(matched(model), length=5)
    assert emitted.arguments[-1].name == "model.rotary.inv_freq"
    assert (emitted.arguments[0].shape, emitted.result.shape) == ((5,), (5, 61))
    assert "tensor<?" not in emitted.text
    check_numbers(matched(model), model, emitted, 5)


def test_arguments_that_are_rows_of_tensors() -> None:
    model = tiny_model(num_layers=1, model_type="phi3")
    emitted = emit_mlir(matched(model), length=5, constants=model.module.constants())
    check_numbers(matched(model), model, emitted, 5)
    key = next(e for e in emitted.arguments if e.name.endswith("k_proj.weight"))
    assert key.tensors == ("model.layers.0.self_attn.qkv_proj.weight",)


OPERATOR_CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "embedding": (lambda x, p, w: x + ops.embedding(p, w), {"w": (64, 32)}),
    "linear": (lambda x, p, w, b: ops.linear(x, w, b), {"w": (24, 32), "b": (24,)}),
    "fused_linear": (
        lambda x, p, w, g: ops.fused_linear(x, w, w[:, 0], g, 1e-5, x[:, :20], True),
        {"w": (40, 32), "g": (32,)},
    ),
    "rms_norm": (lambda x, p, w: ops.rms_norm(x, w, 1e-5), {"w": (32,)}),
    "add_rms_norm": (lambda x, p, w: ops.add_rms_norm(x, x, w, 1e-5)[0], {"w": (32,)}),
    "rope": (
        lambda x, p, inv_freq: ops.rope(x.unflatten(-1, (2, 16)), p, inv_freq, True).flatten(-2),
        {"inv_freq": (4,)},
    ),
    "gelu": (lambda x, p: ops.gelu(x), {}),
    "causal_conv1d": (lambda x, p, w: ops.causal_conv1d(x, w), {"w": (32, 1, 4)}),
    "sigmoid_gate": (lambda x, p, w: ops.sigmoid_gate(x, x * w), {"w": (32,)}),
    "swiglu": (lambda x, p, w: ops.swiglu(x, x * w), {"w": (32,)}),
    "clamped_swiglu": (lambda x, p, w: ops.clamped_swiglu(x, x * w, 0.5, 1.702), {"w": (32,)}),
    "swiglu_packed": (lambda x, p, w: ops.swiglu_packed(x * w), {"w": (32,)}),
    "attention": (  # a window, which the reference masks in place
        lambda x, p, w: ops.attention(
            *((x * w).unflatten(-1, (2, 16)), x.unflatten(-1, (2, 16)), x.unflatten(-1, (2, 16))),
            *(0.25, 3),
        ).flatten(-2),
        {"w": (32,)},
    ),
}
REFUSED: dict[str, Callable[..., Tensor]] = {
    "router": lambda x, p, w: ops.router(x, 2, True)[0],
    "expert_linear": lambda x, p, w: ops.expert_linear(x, w, p[:, None])[:, 0],
    "fused_expert_linear": lambda x, p, w: ops.fused_expert_linear(x, w, p[:, None])[:, 0],
    "experts": lambda x, p, w: ops.experts(x, x[:, :3], w, w, w, 2, True),
    "gated_delta_rule": lambda x, p, w: ops.gated_delta_rule(
        *(x[:, :24], x[:, :2], x[:, 2:4], w[0, 0, :2], w[0, 0, 2:4]), 1, 8
    ).flatten(-2),
}
"""Whose references sort, or walk over experts or tokens."""
STATEFUL = {
    *("attention_step", "rope_attention_step", "causal_conv1d_step", "gated_delta_rule_step"),
    "delta_rule_norm_step",
}
AFTER_LOGITS = {"sample"}
IN_TOWERS = {
    *("full_attention", "interpolate_rows", "layer_norm", "merge_rows", "tile_features"),
    *("add_tile_rows", "add_position_rows", "pad_rows", "prepend_row", "join_columns"),
    *("tile_attention", "cross_attention", "add_gated", "mask_text_rows"),
    *("add_rows", "pool_blocks", "project_rows"),
}
"""Operators of image encoders and of layers that read images, which have no MLIR."""
AFTER_PRECISION = {"round_q80", "local_experts", *(OPERATORS[each].name for each in COLLECTIVES)}


def test_every_operator_that_a_model_has_is_tried_below() -> None:
    names = {entry.name for entry in OPERATORS.values() if entry.overload.namespace == "tilewright"}
    others = STATEFUL | AFTER_LOGITS | AFTER_PRECISION | IN_TOWERS
    assert names - others == OPERATOR_CALLS.keys() | REFUSED


@pytest.mark.parametrize("name", OPERATOR_CALLS)
def test_an_operator_becomes_its_reference(name: str) -> None:
    function, shapes = OPERATOR_CALLS[name]
    graph_module, model = function_graph(function, **shapes)
    targets = {node.target for node in graph_module.graph.nodes}
    assert targets & OPERATORS.keys() >= {getattr(ops, name).overload}
    emitted = emit_mlir(graph_module)
    assert "tilewright" not in emitted.text
    check_numbers(graph_module, model, emitted, 1, 8)


@pytest.mark.parametrize("name", REFUSED)
def test_operators_whose_references_walk_are_refused(name: str) -> None:
    graph_module, _ = function_graph(REFUSED[name], w=(3, 32, 32))
    with pytest.raises(CompileError, match=r"has no MLIR|torch-mlir cannot lower"):
        emit_mlir(graph_module)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_text_reads_back_and_names_its_arguments(
    emitted_of: Callable[[str], MlirModule], dialect: str
) -> None:
    emitted = emitted_of(dialect)
    module = parsed(emitted.text)
    (function,) = module.body.operations
    assert len(function.arguments) == len(emitted.arguments)
    signature = emitted.text.partition("@main(")[2].partition(") -> ")[0]
    assert re.findall(r"%([\w.]+):", signature) == [entry.name for entry in emitted.arguments]
    assert [entry.name for entry in emitted.arguments[:2]] == ["tokens", "positions"]
    types = re.findall(r"tensor<\[?([\d?x,]*\d|\?)", signature)
    shapes = [re.split("[x,]", found) for found in types]
    expected = [["?" if size is None else str(size) for size in e.shape] for e in emitted.arguments]
    assert shapes == expected


def test_the_dialects_are_what_they_are_called(emitted_of: Callable[[str], MlirModule]) -> None:
    assert "torch.aten.mm" in emitted_of("torch").text
    assert "linalg" not in emitted_of("torch").text
    assert "linalg.matmul" in emitted_of("linalg").text
    assert "torch.aten" not in emitted_of("linalg").text


def test_the_json_says_what_to_feed(emitted_of: Callable[[str], MlirModule]) -> None:
    emitted = emitted_of("linalg")
    read = json.loads(emitted.arguments_json())
    assert (read["dialect"], read["function"]) == ("linalg", "main")
    assert [entry["index"] for entry in read["arguments"]] == list(range(len(emitted.arguments)))
    assert read["arguments"][1] == {
        "index": 1,
        "name": "positions",
        "role": "input",
        "shape": ["length"],
        "dtype": "int64",
        "tensors": [],
    }
    down = next(entry for entry in read["arguments"] if "0.mlp.down" in entry["name"])
    assert (down["shape"], down["dtype"], down["role"]) == ([32, 48], "float32", "weight")
    assert down["tensors"] == ["model.layers.0.mlp.down_proj.weight"]
    assert read["result"]["shape"] == ["length", 61]


def test_a_tied_weight_is_one_argument() -> None:
    fed = {}
    for tied in (True, False):
        model = tiny_model(num_layers=1, tie_embeddings=tied)
        emitted = emit_mlir(matched(model), "torch", length=3)
        fed[tied] = [name for entry in emitted.arguments for name in entry.tensors]
        assert len(set(fed[tied])) == len(fed[tied])
    assert set(fed[False]) - set(fed[True]) == {"lm_head.weight"}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_weight_is_in_the_text(emitted_of: Callable[[str], MlirModule], dialect: str) -> None:
    text = emitted_of(dialect).text
    literals = re.findall(r"dense(?:_resource)?<[^>]*> : tensor<([^>]*)>", text)
    assert literals, "the constant at least"
    for found in literals:
        sizes = [int(size) for size in found.split("x")[:-1]]
        assert np.prod(sizes) <= tiny_config().head_dim // 2, found
    assert not re.search(r"dense<[^>]{40}", text)
    blobs = re.findall(r'"0x[0-9A-F]*"', text)
    assert len(blobs) == 1 and len(blobs[0]) < 100


def test_the_text_grows_with_layers_and_not_with_widths() -> None:
    def emitted(**changes: Any) -> dict[str, MlirModule]:
        return emit_dialects(matched(tiny_model(**changes)), length=64)

    one, two = emitted(num_layers=1), emitted(num_layers=2)
    wide = emitted(num_layers=1, hidden_size=512, intermediate_size=2048, vocab_size=9999)
    for dialect in DIALECTS:
        size = len(one[dialect].text)
        assert len(two[dialect].text) - size < 25_000
        assert len(wide[dialect].text) < 1.1 * size


def test_the_same_graph_gives_the_same_text_and_is_left_alone() -> None:
    model = tiny_model(num_layers=1)
    graph_module = matched(model)
    before = graph_text(graph_module.graph)
    constants = model.module.constants()
    texts = {emit_mlir(graph_module, length=4, constants=constants).text for _ in range(2)}
    assert len(texts) == 1
    assert graph_text(graph_module.graph) == before


@pytest.mark.parametrize("dialect", ["llvm", "tosa", "stablehlo", "loops", "raw", "", "Torch"])
def test_other_stages_are_refused_by_name(dialect: str) -> None:
    with pytest.raises(ConfigError) as raised:
        emit_mlir(matched(tiny_model()), dialect)
    assert str(raised.value) == f"dialect {dialect!r} is not emitted; allowed: torch, linalg"


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_of_no_tokens_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=rf"length of {length} tokens; allowed: 1 or more"):
        emit_mlir(matched(tiny_model()), length=length)


def test_without_torch_mlir_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_mlir.fx", None)
    monkeypatch.setitem(sys.modules, "torch_mlir", None)
    with pytest.raises(CompileError, match="pip install torch-mlir") as raised:
        emit_mlir(matched(tiny_model()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_operator_torch_mlir_cannot_lower_is_named(
    dialect: str, capfd: pytest.CaptureFixture[str]
) -> None:
    graph_module, _ = function_graph(lambda x, p, w: torch.special.bessel_j0(x * w), w=(32,))
    with pytest.raises(CompileError) as raised:
        emit_mlir(graph_module, dialect)
    expected = f"torch-mlir cannot lower aten.special_bessel_j0 to dialect {dialect!r}"
    assert str(raised.value) == expected
    assert capfd.readouterr() == ("", "")


def test_a_reference_that_depends_on_values_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def reference(gate: Tensor, up: Tensor) -> Tensor:
        return gate if float(up.sum()) > 0 else up

    changed = dataclasses.replace(ops.swiglu, reference=reference)
    monkeypatch.setitem(OPERATORS, ops.swiglu.overload, changed)
    with pytest.raises(CompileError, match=r"^operator 'swiglu' has no MLIR: \w+") as raised:
        emit_mlir(matched(tiny_model(num_layers=1)))
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")


def test_a_graph_with_state_is_a_bug_of_ours() -> None:
    with pytest.raises(AssertionError, match="without state"):
        emit_mlir(lowered(tiny_model())[0])


@pytest.mark.slow
@pytest.mark.weights
def test_smollm2_stays_small(smollm2_path: Path) -> None:
    model = load_model(smollm2_path)
    graph_module = trace(model.module)
    run_passes(graph_module, MATCH.passes, context_of(model), verify=MATCH.verify)  # type: ignore[arg-type]
    for dialect in DIALECTS:
        emitted = emit_mlir(graph_module, dialect, constants=model.module.constants())
        assert len(emitted.text) < 1_000_000
        assert len(emitted.arguments) == 2 + 30 * 9 + 2
        assert sum(entry.role == INPUT for entry in emitted.arguments) == 2
        parsed(emitted.text)
