"""Emitted ttnn files: their text, what differs between layers, what is refused, their weights.

That ttnn takes them is shown by slow_check_ttnn.py, where ttnn is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.targets.tenstorrent.boards import board_precision, programs
from tests.tiny import QWEN2, check_golden, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.emit_ttnn.emit import (
    emit_ttnn,
    prompt_length,
    write_weights,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DeviceProgram,
    Matmul,
    TtInstruction,
)
from tilewright.compiler.targets.tenstorrent.program.product_blocks import (
    PromptBlocks,
    prompt_blocks,
    step_blocks,
)
from tilewright.errors import CompileError, NoRoomError
from tilewright.models.config import DeltaShape, RopeConfig, YarnScaling

SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
OPTIONS = CompileOptions(max_batch=2, max_context=128)


def small_model(**changes: Any) -> SimpleNamespace:
    """Two layers of 64 columns and heads of 32: every side is a multiple of a tile."""
    return tiny_model(**(SMALL | changes))


def emitted(model: SimpleNamespace, mesh: Mesh | None = None, **named: Any) -> str:
    return emit_ttnn(*programs(model, mesh, options=OPTIONS, **named))


def functions(source: str, *names: str) -> str:
    """The source of some functions and constants of a file, in its order."""
    parts = []
    for node in ast.parse(source).body:
        name = getattr(node, "name", "")
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        if name in names or (name.startswith("SHARES") and "SHARES" in names):
            parts.append(ast.get_source_segment(source, node) or "")
    return "\n\n".join(parts) + "\n"


def test_the_golden_file_of_one_chip() -> None:
    check_golden("tenstorrent/ttnn_1x1.py.txt", emitted(small_model()))


def test_the_golden_steps_of_two_chips_with_biases_and_heads_that_do_not_divide() -> None:
    model = small_model(num_heads=6, num_kv_heads=3, **QWEN2)
    source = emitted(model, Mesh(2), precision=board_precision("bfp4", "lofi", wo="bfp8"))
    steps = ("prefill_layer", "prefill", "decode_layer", "decode")
    shown = functions(source, "MESH", "SHARES", "OUTSIDE", "layer_weights", *steps)
    check_golden("tenstorrent/ttnn_1x2.py.txt", shown)


def test_a_stream_dealt_over_a_mesh_is_normed_over_it() -> None:
    model = small_model(hidden_size=128, num_heads=4, num_kv_heads=2)
    source = emitted(model, Mesh(2, 2))
    assert "MESH = (2, 2)" in source
    layer = functions(source, "decode_layer")
    before, after = layer.index("rms_norm_pre_all_gather"), layer.index("rms_norm_post_all_gather")
    assert "cluster_axis=0" in layer[before:after]
    assert "ttnn.all_reduce" in layer


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(2), Mesh(2, 2)])
def test_every_file_compiles(mesh: Mesh) -> None:
    model = small_model(hidden_size=128, tie_embeddings=False)
    compile(emitted(model, mesh), "emitted", "exec")


def test_equal_layers_need_no_table_and_unequal_formats_one() -> None:
    model = small_model(num_layers=3)
    assert "TABLE" not in emitted(model)
    precision = board_precision(layers="1: {ff2: bfp4, li_ff2: lofi, kv_cache: bf16}")
    source = emitted(model, precision=precision)
    words = SimpleNamespace(bfloat16="bf16", bfloat8_b="bfp8", bfloat4_b="bfp4")
    found: dict[str, Any] = {"ttnn": words, "LOFI": "lofi", "HIFI2": "hifi2"}
    exec(functions(source, "KINDS", "TABLE"), found)
    rows = found["TABLE"]
    assert rows[0] == rows[2] != rows[1]
    assert rows[1]["mlp.down_proj.weight.dtype"] == "bfp4"
    assert rows[1]["decode.mlp.down_proj.matmul.fidelity"] == "lofi"
    assert rows[1]["k.dtype"] == "bf16"
    assert 't["mlp.down_proj.weight.dtype"]' in functions(source, "layer_weights")
    assert 't["decode.mlp.down_proj.matmul.fidelity"]' in functions(source, "decode_layer")


@pytest.mark.parametrize(
    "title",
    [
        '"""\nimport os\nos.abort()\n"""',
        "a\rimport os",
        "\\",
        "a\u2028import os\x85b\x0c\nraise",
        "# \N{RIGHT-TO-LEFT OVERRIDE}",
    ],
)
def test_no_title_becomes_code(title: str) -> None:
    made = programs(small_model(), options=OPTIONS)
    plain, titled = emit_ttnn(*made), emit_ttnn(*made, title=title)
    assert ast.dump(ast.parse(titled)) == ast.dump(ast.parse(plain))
    assert titled.isascii()


def test_no_name_of_a_module_becomes_code() -> None:
    """Names are the model's own, but they are quoted as if they were not."""

    def renamed(program: DeviceProgram) -> DeviceProgram:
        def of(instruction: TtInstruction) -> TtInstruction:
            if not isinstance(instruction, Matmul) or instruction.group != "lm_head":
                return instruction
            weight = dataclasses.replace(instruction.weight, name="\"'] + os.abort() #\n")
            return dataclasses.replace(instruction, weight=weight, fqn="a\nb()")

        return dataclasses.replace(program, instructions=tuple(map(of, program.instructions)))

    source = emit_ttnn(*map(renamed, programs(small_model(), options=OPTIONS)))
    names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    assert "os" not in names


def test_a_file_without_ttnn_or_a_board_says_so_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(emitted(small_model()))
    (tmp_path / "ttnn.py").write_text("raise ImportError('no ttnn here')\n")
    run = subprocess.run(
        [sys.executable, str(path), "--run-on-device"], capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2 and run.stdout == ""
    assert len(run.stderr.splitlines()) == 1 and "ttnn 0.81" in run.stderr


def test_what_ttnn_does_not_take_is_refused() -> None:
    def refused(
        match: str, options: CompileOptions = OPTIONS, mesh: Mesh | None = None, **changes: Any
    ) -> None:
        made = programs(small_model(**changes), mesh, options=options)
        with pytest.raises(CompileError, match=match):
            emit_ttnn(*made)

    refused("prompts of 96 tokens", CompileOptions(max_context=96))
    refused("prompts of 32 tokens", CompileOptions(max_context=32))
    refused("heads of 96", head_dim=96)
    refused("heads of 64, of which 16", head_dim=64, rope=RopeConfig(10000.0, num_rotated=16))
    refused("a side of 80", intermediate_size=80)
    refused("48 columns over 1 chips", hidden_size=48)


def test_layers_of_unequal_shape_have_functions_of_their_own() -> None:
    prefill, decode = programs(small_model(), options=OPTIONS)
    changed = tuple(
        dataclasses.replace(each, k_block=2 * each.k_block)
        if isinstance(each, Matmul) and each.layer == 1 and each.group == "ff2"
        else each
        for each in prefill.instructions
    )
    source = emit_ttnn(dataclasses.replace(prefill, instructions=changed), decode)
    assert "(prefill_layer_0, prefill_layer_1)[[0, 1][layer]]" in functions(source, "prefill")
    first, second = (functions(source, f"prefill_layer_{n}") for n in (0, 1))
    assert first.replace("layer_0", "layer_1") != second
    assert "if layer in (1,):" in functions(source, "layer_weights")


def test_weights_are_written_whole_and_exact(tmp_path: Path) -> None:
    model = small_model()
    embed = model.checkpoint.tensors["model.embed_tokens.weight"]
    model.checkpoint.tensors["model.embed_tokens.weight"] = embed.bfloat16().float()
    _, decode = programs(model, Mesh(2), options=OPTIONS)
    write_weights(decode, weight_source(model), tmp_path)
    names = ["layer_000.safetensors", "layer_001.safetensors", "outside.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    outside, layer = load_file(tmp_path / names[2]), load_file(tmp_path / names[1])
    assert outside["model.embed_tokens.weight"].dtype == torch.bfloat16
    down = layer["model.layers.1.mlp.down_proj.weight"]
    source = model.checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert down.dtype == torch.float32 and torch.equal(down, source.T)
    written = {**outside, **load_file(tmp_path / names[0]), **layer}
    assert written.keys() == {weight.name for weight in decode.weights}


def test_a_folder_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    model = small_model()
    _, decode = programs(model, options=OPTIONS)
    with pytest.raises(NoRoomError, match="cannot be written"):
        write_weights(decode, weight_source(model), tmp_path / "missing")


def test_blocks_fit_a_core() -> None:
    """A head too wide for a core's L1 is cut; a long prompt's sums are made some rows at a time."""
    prefill, decode = programs(small_model(), options=OPTIONS)
    (head,) = [e for e in decode.instructions if isinstance(e, Matmul) and e.group == "lm_head"]
    assert step_blocks(head).num_pieces == 1
    wide = dataclasses.replace(head, weight=dataclasses.replace(head.weight, columns=128_256))
    assert step_blocks(wide).num_pieces > 1
    up = next(e for e in prefill.instructions if isinstance(e, Matmul) and e.group == "ff1_3")
    assert prompt_blocks(up) == PromptBlocks(k_block=up.k_block, rows=1, columns=1, out_rows=1)
    out = dataclasses.replace(up.out, rows=4096, columns=8192)
    cut = prompt_blocks(dataclasses.replace(up, out=out))
    assert (cut.rows, cut.columns) == (16, 32)
    assert 1 < cut.out_rows < 16 and 16 % cut.out_rows == 0


@pytest.mark.parametrize("context", [64, 100, 128, 300, 1000, 1024, 4096, 131072])
def test_a_prompt_runs_in_whole_chunks_that_the_pages_hold(context: int) -> None:
    length = prompt_length(context)
    assert length % min(256, length) == 0 and length <= 1024
    assert length <= -(-context // 32) * 32


def test_norms_of_heads_move_to_interleaved_memory_in_a_decode_step() -> None:
    source = emitted(small_model(model_type="qwen3"), name="p150")
    ast.parse(source)
    step = functions(source, "decode_layer")
    for name in ("q", "k"):
        norm = step.index(f"{name} = ttnn.rms_norm(")
        assert f"{name} = ttnn.to_memory_config({name}, L1)" in step[:norm]
        assert f"{name} = ttnn.to_memory_config({name}, memory)" in step[norm:]
    assert "to_memory_config(q, memory)" not in functions(source, "prefill_layer")
    assert "NUM_BANKS = 8" in source


EXPERTS = {"num_experts": 32, "experts_per_token": 2, "expert_size": 32}
MODERN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"windows": (64, 0), "logit_cap": 5.0},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {
        **EXPERTS,
        **{"windows": (64, 0), "attention_bias": True, "output_bias": True},
        "rope": RopeConfig(150000.0, YarnScaling(4.0, 64, 1.1386294361119891, truncate=False)),
    },
    "qwen3_5_moe": {
        **EXPERTS,
        **{"shared_size": 32, "head_dim": 64, "linear_layers": (True, False)},
        "delta": DeltaShape(2, 4, 32, 32, 4),
        "rope": RopeConfig(10000.0, num_rotated=32),
    },
}
CALLS: dict[str, tuple[str, ...]] = {
    "gemma3_text": ("step.cos[t[", "ttnn.tanh(", "UnaryOpType.GELU"),
    "qwen3_moe": ("routed(", "expert_product(", "combined_experts("),
    "gpt_oss": ("clamped_swiglu(", "attention_sink=sink_logits(", "1.13862943611"),
    "qwen3_5_moe": ("rotate_first(", "convolve_step(", "delta_step(", "norm_value_heads("),
}


@pytest.mark.parametrize("name", MODERN)
def test_models_of_today_have_a_file(name: str, tmp_path: Path) -> None:
    """Every called function is in the file, and every weight is written."""
    model = small_model(model_type=name, **MODERN[name])
    made = programs(model, Mesh(2), options=OPTIONS, name="p300")
    source = emit_ttnn(*made)
    tree = ast.parse(source)
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for call in CALLS[name]:
        assert call in source
        assert not call.endswith("(") or call.startswith(("ttnn", "att")) or call[:-1] in defined
    write_weights(made[1], weight_source(model), tmp_path)
    written = {key: each for path in tmp_path.iterdir() for key, each in load_file(path).items()}
    assert written.keys() == {weight.name for weight in made[1].weights}
    is_cast_after_sum = "out_proj = cast(out_proj, ttnn.bfloat16)" in source
    assert is_cast_after_sum == (name == "qwen3_5_moe")
    experts = next((w for w in made[1].weights if w.num_experts), None)
    if experts is not None:
        assert written[experts.name].shape == (32, experts.rows, experts.columns)
        assert f"experts_over=(1, 2), experts={experts.num_experts}" in source
