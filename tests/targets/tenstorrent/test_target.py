"""The boards as targets: pipelines, contracts, weight storage, and written folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.fx import GraphModule

from tests.targets.tenstorrent.boards import OPTIONS, board, board_precision, emulated, programs
from tests.targets.test_weight_storage import ask_for
from tests.tiny import lowered, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import BuiltProgram, CompileOptions, WeightStorage
from tilewright.compiler.targets.table import get_target, target_names
from tilewright.compiler.targets.tenstorrent.target import MESHES, BoardTarget
from tilewright.errors import CheckpointError, CompileError, ConfigError, NoRoomError

MODEL = tiny_model(std=0.2, hidden_size=64)
TOKENS = random_tokens(9)
CHUNKS = [6, 1, 1]
WEIGHTS = "weights.safetensors"


def silent(what: str, done: int, total: int) -> None:
    pass


def graph() -> GraphModule:
    return lowered(MODEL, target="n150", precision=board_precision())[0]


def built(folder: Path, target: BoardTarget, options: CompileOptions = OPTIONS) -> BuiltProgram:
    target.build(graph(), weight_source(MODEL), folder, options, silent)
    return BuiltProgram(folder, target.contract(graph(), options), graph, graph)


@pytest.mark.parametrize("name", MESHES)
def test_boards_are_targets(name: str) -> None:
    target = get_target(name)
    assert name in target_names()
    assert isinstance(target, BoardTarget)
    assert target.name == name
    passes = [each.name for stage in target.stages() for each in stage.passes]
    assert passes[-5:] == [
        *("merge_qkv", "insert_state", "gather_logit_rows"),
        *("fuse_rope_attention", "gather_before_norm"),
    ]


def test_meshes_of_the_boards() -> None:
    assert {name: str(mesh) for name, mesh in MESHES.items()} == {
        "n150": "1x1",
        "n300": "1x2",
        "t3k": "1x8",
        "tg": "8x4",
        "p100": "1x1",
        "p150": "1x1",
        "p300": "1x2",
        "qb2": "1x4",
        "loudbox": "1x8",
        "bh-galaxy": "8x4",
    }


def test_groups_of_a_box() -> None:
    """Data-parallel groups are meshes of one axis, the whole box is as it is."""
    groups = {count: str(BoardTarget("tg").group(count)) for count in (1, 2, 4, 32)}
    assert groups == {1: "8x4", 2: "1x16", 4: "1x8", 32: "1x1"}
    graph_module, _ = lowered(MODEL, target="t3k", precision=board_precision())
    for program in BoardTarget("t3k").programs(graph_module, OPTIONS, num_groups=4):
        assert program.mesh == Mesh(2)
        assert program.batch in (1, OPTIONS.max_batch)
    with pytest.raises(ConfigError) as caught:
        BoardTarget("t3k").group(3)
    assert str(caught.value) == (
        "3 data-parallel groups of the 8 chips of t3k; allowed: 1, 2, 4, 8"
    )


@pytest.mark.parametrize("name", ["n150", "n300", "t3k", "tg"])
def test_a_board_s_program_is_compiled_and_run(name: str) -> None:
    """Eight heads, which all of them can deal."""
    model = tiny_model(std=0.2, num_heads=8, num_layers=1)
    executable = emulated(model, name=name)
    assert executable.device_name == name.upper()
    logits = prefill(executable, TOKENS, CHUNKS)
    assert torch.isfinite(logits).all() and logits.std() > 0.1


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(4, 2)])
def test_a_folder_gives_the_bits_of_compiling(mesh: Mesh, tmp_path: Path) -> None:
    """Built for any context, and loaded for one."""
    program = built(tmp_path, board(mesh), dataclasses.replace(OPTIONS, max_context=256))
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]
    steps = []
    loaded = board(mesh).load(program, OPTIONS, lambda *step: steps.append(step))
    expected = prefill(emulated(MODEL, mesh), TOKENS, CHUNKS)
    assert torch.equal(prefill(loaded, TOKENS, CHUNKS), expected)
    assert steps[-1] == ("weights", 1, 1)


def test_building_does_not_ask_for_room_for_a_context_nobody_runs(tmp_path: Path) -> None:
    """Folders are made for a model's longest context, which a board may not have room for."""
    longest = dataclasses.replace(OPTIONS, max_batch=32, max_context=2**21)
    program = built(tmp_path, board(), longest)
    board().load(program, OPTIONS, silent)
    with pytest.raises(CompileError, match="2097152 positions"):
        board().load(program, longest, silent)


def test_progress_counts_weights(tmp_path: Path) -> None:
    steps: list[Any] = []
    board().build(
        graph(), weight_source(MODEL), tmp_path, OPTIONS, lambda *step: steps.append(step)
    )
    count = len(programs(MODEL)[1].weights)
    assert steps == [("weights", done, count) for done in range(1, count + 1)]


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    program = built(tmp_path, board())
    path = tmp_path / WEIGHTS
    whole, parts = path.read_bytes(), {key: part.clone() for key, part in load_file(path).items()}

    def refusal(target: BoardTarget | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            (target or board()).load(program, OPTIONS, silent)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and "\n" not in message
        return message

    refusal(board(Mesh(2)))
    path.write_bytes(whole[:-100])
    refusal()
    path.write_bytes(b"nothing of the kind")
    refusal()
    name = next(iter(parts))
    save_file({key: part for key, part in parts.items() if key != name}, path)
    assert name.partition("@")[0] in refusal()
    save_file(parts | {name: parts[name][:-1].contiguous()}, path)
    assert name in refusal()
    save_file(parts | {name: parts[name].double()}, path)
    assert name in refusal()
    path.unlink()
    refusal()
    path.write_bytes(whole)
    board().load(program, OPTIONS, silent)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).mkdir()
    with pytest.raises(NoRoomError) as caught:
        built(tmp_path, board())
    assert "allowed: a folder with room" in str(caught.value)


def test_exact_arithmetic_is_refused(tmp_path: Path) -> None:
    exact = dataclasses.replace(OPTIONS, compute="exact")
    for work in (
        lambda: board().build(graph(), weight_source(MODEL), tmp_path, exact, silent),
        lambda: emulated(MODEL, options=exact),
    ):
        with pytest.raises(CompileError, match=r"compute exact on target n150.*; allowed: fast"):
            work()


def lines(**changes: Any) -> list[str]:
    precision = precision_of("bfp8", "hifi2", **({"embedding": "bf16"} | changes))
    graph_module, _ = lowered(tiny_model(num_layers=4), target="n150", precision=precision)
    return [str(entry) for entry in get_target("n150").contract(graph_module, OPTIONS).entries]


def test_the_contract_honours_what_a_board_has() -> None:
    found = lines(block_axis="out", li_ff2="lofi", kv_cache="bfp4", layers="2: {wo: bf16}")
    assert "ff1_3 weights: bfp8/out: honoured" not in found, "the axis stands beside"
    assert "ff1_3 weights: bfp8/out: honoured (bfp8 blocks along out)" in found
    assert "embedding weights: bf16: honoured" in found
    for phase in ("prefill", "decode"):
        assert f"li_ff2 {phase}: lofi: honoured" in found
        assert f"sdpa_{phase}: hifi2: honoured" in found
    assert "kv_cache: bfp4: honoured" in found
    assert "activation: mixed: honoured" in found
    assert "wo weights [2]: bf16: honoured" in found


def test_the_contract_says_which_axis_is_used() -> None:
    assert "wo weights: bfp8: not honoured (bfp8 blocks along out)" in lines()
    ids = []
    for axis in ("in", "out"):
        precision = board_precision(block_axis=axis)
        graph_module, _ = lowered(MODEL, target="n150", precision=precision)
        ids.append(board().contract(graph_module, OPTIONS).effective_id)
    assert ids[0] == ids[1], "one configuration in the end"


@pytest.mark.parametrize("group", ["kv_cache", "activation", "ff2"])
def test_the_contract_says_what_is_refused(group: str) -> None:
    field = "ff2 weights" if group == "ff2" else group
    assert f"{field}: fp32: not honoured (refused)" in lines(**{group: "fp32"})


def ask(shape: tuple[int, ...], form: str, group: str = "ff2") -> WeightStorage:
    return ask_for("n150", shape, form, block_axis="out", group=group)


def test_weight_storage_by_hand() -> None:
    assert ask((33, 40), "bfp8") == WeightStorage("bfp8 tiles", 4 * 1088, "[in, out]")
    assert ask((385, 32), "bfp4") == WeightStorage("bfp4 tiles", 13 * 576, "[in, out]")
    assert ask((61, 40), "bf16", "embedding") == WeightStorage("bf16 tiles", 4 * 2048)
    assert ask((40,), "fp32", "") == WeightStorage("bf16 tiles", 2 * 2048)
    with pytest.raises(CompileError, match="ff2: weights in q40"):
        ask((33, 40), "q40")
