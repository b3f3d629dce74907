"""Programs as texts: goldens of tiny ones on three kinds of mesh, and what a line says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.fx import GraphModule

from tests.targets.tenstorrent.boards import OPTIONS, board, board_precision, programs
from tests.tiny import QWEN2, check_golden, lowered, tiny_model
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram
from tilewright.compiler.targets.tenstorrent.program.text import program_text

MESHES = {"1x1": Mesh(), "1x2": Mesh(2), "4x2": Mesh(4, 2)}
PHASES = ("prefill", "decode")


def tiny_programs(mesh: Mesh) -> dict[str, DeviceProgram]:
    """Of a layer with tied embeddings: 96 columns of the stream, four heads to two key heads."""
    model = tiny_model(num_layers=1, hidden_size=96)
    return dict(zip(PHASES, programs(model, mesh), strict=True))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", MESHES)
def test_the_golden_text(name: str, phase: str) -> None:
    program = tiny_programs(MESHES[name])[phase]
    check_golden(f"tenstorrent/{phase}_{name}.txt", program_text(program))


def test_the_golden_text_of_a_program_with_biases() -> None:
    """And with key heads and columns that two chips cannot have equal shares of."""
    sizes = {"hidden_size": 64, "num_heads": 6, "num_kv_heads": 3, "intermediate_size": 80}
    changes: dict[str, Any] = {**QWEN2, **sizes}
    model = tiny_model(num_layers=1, **changes)
    precision = board_precision("bfp4", "lofi", ff2="bf16", wo="bfp8", li_ff2="hifi4")
    _, decode = programs(model, Mesh(2), precision=precision)
    check_golden("tenstorrent/decode_1x2_padded.txt", program_text(decode))


def renamed(graph_module: GraphModule) -> GraphModule:
    """A copy whose nodes all have other names."""
    other = copy.deepcopy(graph_module)
    for index, node in enumerate(other.graph.nodes):
        node.name = f"other_{index}"
    return other


@pytest.mark.parametrize("name", MESHES)
def test_names_of_the_graph_are_not_in_it(name: str) -> None:
    graph_module, _ = lowered(tiny_model(), target="n150", precision=board_precision())
    target = board(MESHES[name])
    texts = [
        [program_text(program) for program in target.programs(graph, OPTIONS)]
        for graph in (graph_module, renamed(graph_module))
    ]
    assert texts[0] == texts[1]


def test_a_layer_alone() -> None:
    """Its instructions and what they read, the numbers beginning anew."""
    _, decode = programs(tiny_model())
    whole, first, second = (program_text(decode, layer=layer) for layer in (None, 0, 1))
    assert first.replace("layers.0.", "layers.1.") == second
    assert "embed_tokens" not in first and "lm_head" not in first
    assert "embed_tokens" in whole and "lm_head" in whole
    assert first.count(" = matmul(") * 2 + 1 == whole.count(" = matmul(")


def test_every_value_is_declared_where_it_is_made() -> None:
    """Once, before it is read; weights and caches stand above all instructions."""
    for program in tiny_programs(Mesh(4, 2)).values():
        known: set[str] = set()
        in_body = False
        for line in program_text(program).splitlines()[1:]:
            made, _, call = line.rpartition(" = ")
            in_body = in_body or "(%" in call
            if not in_body:
                known.add(line.split(":")[0])
                continue
            arguments = call[call.index("(") + 1 : -1].split(", ")
            read = {each for each in arguments if "=" not in each} - {"hifi2", "hifi4"}
            assert read <= known, line
            outs = {part.split(":")[0] for part in made.split(", ") if part}
            assert not outs & known
            known |= outs
        assert in_body


def test_what_is_still_to_be_added_and_what_is_zeros_shows() -> None:
    text = program_text(tiny_programs(Mesh(4, 2))["decode"])
    assert "down_proj.weight: bfp8[32/r(80 of 128 zeros)x64/c(32 of 128 zeros)]" in text
    assert "bf16[4x64]/c+r" in text
    assert "reduce" in text
