"""A lowered graph survives JSON whole, and a file that lies is refused in one line."""

from __future__ import annotations

import functools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx import GraphModule

from tests.dealt_models import dealt, make
from tests.tiny import QWEN2, lowered, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.ir.cost import step_costs
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.serialise import graph_json, read_graph
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.ir.verify import verify_lowered
from tilewright.compiler.passes.gather_logit_rows import gather_logit_rows
from tilewright.compiler.passes.insert_state import insert_state
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import Needs
from tilewright.compiler.targets.program.lowering import lower_to_program
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError
from tilewright.models import load_model

WHERE = Path("graph.json")
MIXED = precision_of("bfp8", "hifi2", layers="0: {ff2: bf16, li_ff2: hifi4}", block_axis="out")


def graph(target: str = "cpu", **changes: Any) -> GraphModule:
    return lowered(tiny_model(**changes), target=target, precision=MIXED)[0]


@functools.cache
def whole() -> bytes:
    """A layer's graph as a file."""
    return graph_json(graph("reference", num_layers=1))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": False}, QWEN2], ids=repr)
@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_everything_comes_back(target: str, changes: dict[str, Any]) -> None:
    before = graph(target, **changes)
    after = read_graph(graph_json(before), WHERE)
    verify_lowered(after)
    assert graph_text(after.graph) == graph_text(before.graph)
    pairs = list(zip(before.graph.nodes, after.graph.nodes, strict=True))
    assert all(info(one) == info(other) for one, other in pairs)
    assert [one.name for one, _ in pairs] == [other.name for _, other in pairs]
    for num_tokens, context in ((1, 100), (7, 7)):
        asked = {"num_tokens": num_tokens, "context": context}
        assert step_costs(after, **asked) == step_costs(before, **asked)
    assert graph_json(after) == graph_json(before)


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe", "tiny-hybrid"])
def test_a_graph_of_fixed_sizes_has_the_same_plan(shape: str) -> None:
    model: Any = load_model(f"shape:{shape}")
    before = lowered(model, target="cpu-native", precision=load_precision("all-bfp8"))[0]
    needs = Needs(target="cpu-native", others="none")
    plans = [
        lower_to_program(read_graph(graph_json(before), WHERE, is_fixed=is_fixed), needs)
        for is_fixed in (False, True)
    ]
    assert plans[0] == plans[1] == lower_to_program(before, needs)


def test_a_graph_that_came_back_computes_the_same() -> None:
    model, tokens = tiny_model(std=0.2), random_tokens(9)
    before = graph("reference", std=0.2)
    options = CompileOptions(max_context=16)
    logits = [
        prefill(
            get_target("reference").compile(
                each, weight_source(model), options, lambda what, done, total: None
            ),
            tokens,
        )
        for each in (before, read_graph(graph_json(before), WHERE))
    ]
    assert torch.equal(*logits)


def changed(path: list[Any], value: Any) -> bytes:
    """The JSON of a graph with one value replaced."""
    record = json.loads(whole())
    place = record
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(record).encode()


def call_of(op: str) -> int:
    record = json.loads(whole())
    return next(index for index, call in enumerate(record["calls"]) if call["op"] == op)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["calls", 0, "op"], "aten.from_file.default", "which is no op of a lowered graph"),
        (["calls", 0, "op"], "os.system", "which is no op of a lowered graph"),
        (["calls", 0, "args", 0], "rm -rf", "argument 'rm -rf'"),
        (["calls", 0, "args", 0], {"node": "nowhere"}, "nowhere"),
        (["calls", 0, "args", 0], {"link": "tokens"}, "node"),
        (["calls", 1, "name"], "tokens", "occurs twice"),
        (["inputs", 0, "shape"], [-1], "shape"),
        (["inputs", 0, "shape"], [10**30], "has shape"),
        (["inputs", 2, "shape"], [61, 1 << 50], "shape"),
        (["inputs", 0, "dtype"], "float8", "float8"),
        (["inputs", 1, "name"], "tokens", "occurs twice"),
        (["inputs", 1, "name"], "a b", "is no name"),
        (["inputs", 2, "facts", "recipe"], None, "has no recipe"),
        (["inputs", 2, "facts", "role"], 7, "Expected `str`"),
        (["inputs"], [], "not a lowered graph"),
        (["calls"], [], "is no call"),
        (["output"], "tokens", "is no call"),
    ],
)
def test_a_file_that_lies_is_refused(path: list[Any], value: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_graph(changed(path, value), WHERE)
    assert str(caught.value).startswith("graph.json: not a")
    assert "\n" not in str(caught.value)


def test_shapes_that_contradict_each_other_are_refused() -> None:
    record = json.loads(whole())
    at = next(i for i, each in enumerate(record["inputs"]) if "down_proj" in each["name"])
    with pytest.raises(CheckpointError, match="not a lowered graph"):
        read_graph(changed(["inputs", at, "shape"], [32, 47]), WHERE)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"inputs": 1}', b"null", b"9" * 9999]
)
def test_what_is_no_graph_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"graph\.json: not a graph") as caught:
        read_graph(data, WHERE)
    assert "\n" not in str(caught.value)


@given(st.data(), st.binary(max_size=3), st.integers(0, 5))
def test_damaged_bytes_are_a_graph_or_refused(data: st.DataObject, new: bytes, cut: int) -> None:
    at = data.draw(st.integers(0, len(whole()) - 1))
    with suppress(CheckpointError):
        read_graph(whole()[:at] + new + whole()[at + cut :], WHERE)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_5_moe"])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_dealt_graph_and_a_rank_s_come_back(rank: int | None, model_type: str) -> None:
    """Places, collectives and words: GELU's form, the wire's format."""
    before, ctx = dealt(make(model_type), ParallelConfig(2, wire="bf16"), rank=rank)
    run_passes(before, [insert_state, gather_logit_rows], ctx)
    after = read_graph(graph_json(before), WHERE)
    assert graph_text(after.graph) == graph_text(before.graph)
    pairs = list(zip(before.graph.nodes, after.graph.nodes, strict=True))
    assert all(info(one) == info(other) for one, other in pairs)
    assert any(info(one).placement is not None for one, _ in pairs) == (rank is None)


def test_only_known_words_are_arguments() -> None:
    before, ctx = dealt(make(), ParallelConfig(2, wire="bf16"), rank=0)
    run_passes(before, [insert_state, gather_logit_rows], ctx)
    data = graph_json(before).replace(b'"bf16"]', b'"a word"]')
    with pytest.raises(CheckpointError, match="argument 'a word'"):
        read_graph(data, WHERE)
