"""Mixtures of experts and hybrids in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests import gguf_models as files
from tests.tiny import lowered, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import load_dense
from tilewright.errors import CheckpointError
from tilewright.models import load_draft_layer
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.sources import stored_shapes

KINDS = ("qwen3_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next")
Q4_0 = gguf.GGMLQuantizationType.Q4_0
SPARSE = ("qwen3_moe", "qwen3_5_moe", "qwen3_next")


def make(kind: str, **changes: Any) -> SimpleNamespace:
    module: Any = import_module(f"tests.models.test_{kind}")
    model: SimpleNamespace = module.make()
    known = {field.name for field in dataclasses.fields(model.config)}
    if changes := {name: value for name, value in changes.items() if name in known}:
        values = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
        return tiny_model(std=0.2, **{**values, **changes})
    return model


def check(model: SimpleNamespace, path: Path, *, within: float = 1e-6) -> GGUFCheckpoint:
    found = open_checkpoint(path)
    assert isinstance(found, GGUFCheckpoint)
    assert dataclasses.replace(found.config, name=model.config.name) == model.config
    check_tensors(found, stored_shapes(model.module))
    for name, tensor in model.checkpoint.tensors.items():
        torch.testing.assert_close(found.get(name), tensor, atol=within, rtol=0)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_is_hugging_faces(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    found = check(model, files.write(model, tmp_path / "m.gguf"))
    for name, meta in found.names.items():
        assert meta.nbytes == 4 * model.checkpoint.tensors[name].numel()
    assert found.content_hash() == open_checkpoint(tmp_path / "m.gguf").content_hash()


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_gate_and_up_in_one_tensor(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    check(model, files.write(model, tmp_path / "m.gguf", fused=True))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole(kind: str, tmp_path: Path) -> None:
    found = open_checkpoint(files.write(make(kind), tmp_path / "m.gguf"))
    for name, meta in found.names.items():
        whole = found.get(name)
        for rows in (slice(1, 3), slice(0, 0), slice(-1, None)):
            got = found.get(name, rows)
            assert got.shape[1:] == meta.shape[1:] and torch.equal(got, whole[rows]), name


@pytest.mark.parametrize("heads", [(1, 3, 8, 24, 3), (4, 4, 8, 8, 2), (2, 6, 16, 8, 4)])
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_value_heads_are_told_apart_whatever_their_number(
    kind: str, heads: tuple[int, ...], tmp_path: Path
) -> None:
    delta = type(make(kind).config.delta)(*heads)
    model = make(kind, delta=delta, linear_layers=(False, True, True), num_layers=3)
    check(model, files.write(model, tmp_path / "m.gguf"))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_put_in_order_too(kind: str, tmp_path: Path) -> None:
    sizes = {"expert_size": 32, "intermediate_size": 32, "shared_size": 32 * (kind != "qwen3_moe")}
    model = make(kind, **(sizes if kind != "qwen3_5" else {}))
    found = check(model, files.write(model, tmp_path / "m.gguf", kind="Q8_0"), within=0.01)
    assert {"F32", "Q8_0"} == {meta.dtype for meta in found.names.values()}


@pytest.mark.parametrize("kind", SPARSE)
def test_blocks_of_experts(kind: str, tmp_path: Path) -> None:
    """Of two types, as files have whose down products are kept better."""
    model = make(kind, hidden_size=64, expert_size=32)
    path = files.write(model, tmp_path / "m.gguf", kind="Q4_0")
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    found = open_checkpoint(path)
    check_tensors(found, stored_shapes(model.module))
    gate, up, down = (
        torch.from_numpy(
            gguf.quants.dequantize(reader[f"blk.1.ffn_{part}_exps.weight"].data, Q4_0).copy()
        )
        for part in ("gate", "up", "down")
    )
    block = "model.layers.1.mlp.experts"
    if kind == "qwen3_5_moe":
        both = torch.cat((gate, up), dim=1)
        assert torch.equal(found.get(f"{block}.gate_up_proj"), both)
        assert torch.equal(found.get(f"{block}.down_proj", slice(2, 4)), down[2:4])
        return
    for expert in range(model.config.num_experts):
        for part, values in (("gate", gate), ("up", up), ("down", down)):
            name = f"{block}.{expert}.{part}_proj.weight"
            assert torch.equal(found.get(name), values[expert]), name
            assert found.names[name].dtype == "Q4_0"
            dtype, stored = found.stored(name)  # type: ignore[attr-defined]
            whole = reader[f"blk.1.ffn_{part}_exps.weight"].data[expert]
            assert dtype == "Q4_0" and np.array_equal(stored, whole.reshape(stored.shape))


def test_layers_that_draft_are_left_out(tmp_path: Path) -> None:
    model = make("qwen3_5_moe")
    count = model.config.num_layers
    draft = {
        f"blk.{count}.attn_norm.weight": np.ones(32, np.float32),
        f"blk.{count}.nextn.eh_proj.weight": np.ones((32, 64), np.float32),
    }

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.kv_data[0]["qwen35moe.block_count"].value = count + 1

    check(model, files.write(model, tmp_path / "m.gguf", extra=extra, changed=draft))
    opened = SimpleNamespace(checkpoint=open_checkpoint(tmp_path / "m.gguf"), config=model.config)
    words = r"mtp\.pre_fc_norm_embedding\.weight of shape \[32\] is missing"
    with pytest.raises(CheckpointError, match=words):
        load_draft_layer(opened)  # type: ignore[arg-type]
    draft = {f"blk.{count + 1}.attn_norm.weight": np.ones(32, np.float32)}
    path = files.write(model, tmp_path / "n.gguf", extra=extra, changed=draft)
    with pytest.raises(CheckpointError, match=r"layers\.5\.input_layernorm\.weight .* is not part"):
        check_tensors(open_checkpoint(path), stored_shapes(model.module))


def test_axes_of_one_may_be_left_out(tmp_path: Path) -> None:
    model, name = make("qwen3_5_moe"), "blk.0.ffn_gate_inp_shexp.weight"
    gate = model.checkpoint.tensors["model.layers.0.mlp.shared_expert_gate.weight"]
    path = files.write(model, tmp_path / "m.gguf", changed={name: gate.numpy()[0]})
    check(model, path)


def _key(name: str, value: object) -> Callable[[gguf.GGUFWriter], None]:
    def extra(writer: gguf.GGUFWriter) -> None:
        kept = writer.kv_data[0]
        kept.pop(name, None)
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)  # type: ignore[arg-type]

    return extra


@pytest.mark.parametrize(
    ("kind", "key", "value", "words"),
    [
        ("qwen3_moe", "expert_count", None, "expert_count is missing; allowed: a whole number fr"),
        ("qwen3_moe", "expert_used_count", 7, "expert_used_count = 7 is not read; .* from 1 to 6"),
        ("qwen3_moe", "expert_weights_scale", 2.5, r"weights_scale = 2.5 .*; allowed: 0.0, 1.0"),
        ("qwen3_moe", "expert_gating_func", 2, "expert_gating_func = 2 is not read; allowed: 0, 1"),
        ("qwen3_moe", "leading_dense_block_count", 1, "leading_dense_block_count = 1 is not read"),
        ("qwen3_5_moe", "expert_weights_norm", False, "weights_norm = False .*; allowed: true$"),
        ("qwen3_5_moe", "ssm.inner_size", 63, r"ssm.inner_size = 63 .*: a multiple of the 4 value"),
        ("qwen3_5_moe", "ssm.group_count", 3, r"time_step_rank = 4 .*: a multiple of the 3 key h"),
        ("qwen3_5", "ssm.state_size", None, "ssm.state_size is missing; allowed"),
        ("qwen3_5", "rope.dimension_sections", [11, 11], r"dimension_sections = \[11, 11\] is not"),
        ("qwen3_5", "rope.dimension_sections", [1.0, 1.0, 1.0], "allowed: 3 or 4 whole numbers"),
        ("qwen3_5", "attention.recurrent_layers", [True], "recurrent_layers = .*each of 4 layers"),
        ("qwen3_next", "ssm.conv_kernel", 1, "ssm.conv_kernel = 1 is not read; allowed: .* from 2"),
    ],
)
def test_keys_that_are_refused(
    kind: str, key: str, value: object, words: str, tmp_path: Path
) -> None:
    arch = gguf.MODEL_ARCH_NAMES[files.ARCHITECTURES[kind]]
    path = files.write(make(kind), tmp_path / "m.gguf", extra=_key(f"{arch}.{key}", value))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"), [("qwen3_moe", False), ("qwen3_next", False), ("qwen3_5_moe", True)]
)
def test_whether_weights_of_experts_add_up(kind: str, said: bool, tmp_path: Path) -> None:
    key = f"{gguf.MODEL_ARCH_NAMES[files.ARCHITECTURES[kind]]}.expert_weights_norm"
    path = files.write(make(kind), tmp_path / "m.gguf", extra=_key(key, said))
    config: Any = open_checkpoint(path).config
    assert config.renormalise is said


@pytest.mark.parametrize("kind", SPARSE)
def test_experts_that_do_not_fit_are_named_with_the_shape_expected(
    kind: str, tmp_path: Path
) -> None:
    model, name = make(kind), "blk.1.ffn_up_exps.weight"
    shape = [model.config.num_experts, model.config.expert_size, 32]
    words = rf"experts\.up_proj of shape \[{shape[0]}, {shape[1]}, 32\] is missing"
    path = files.write(model, tmp_path / "m.gguf", changed={name: None})
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)
    wrong = np.zeros((shape[0] - 1, shape[1], 32), np.float32)
    path = files.write(model, tmp_path / "n.gguf", changed={name: wrong})
    words = rf"experts\.up_proj has shape \[{shape[0] - 1}, .*allowed: \[{shape[0]}, {shape[1]}, 3"
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def test_a_split_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = files.write(
        make("qwen3_next"), tmp_path / "m.gguf", changed={"blk.0.attn_gate.weight": None}
    )
    with pytest.raises(CheckpointError, match=r"in_proj_z\.weight of shape \[64, 32\] is missing"):
        open_checkpoint(path)


def test_a_decay_that_is_none_is_named(tmp_path: Path) -> None:
    changed = {"blk.0.ssm_a": np.zeros(4, np.float32)}
    found = open_checkpoint(files.write(make("qwen3_5"), tmp_path / "m.gguf", changed=changed))
    with pytest.raises(CheckpointError, match=r"layers\.0\.linear_attn\.A_log has a value"):
        found.get("model.layers.0.linear_attn.A_log")


@pytest.mark.parametrize("kind", SPARSE)
def test_a_nan_in_one_expert_is_reported_with_its_tensors_name(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    down = files.converted(model)["model.layers.1.mlp.experts.down_proj.weight"].numpy().copy()
    down[3, 2, 1] = np.nan
    changed = {"blk.1.ffn_down_exps.weight": down}
    model.checkpoint = open_checkpoint(files.write(model, tmp_path / "m.gguf", changed=changed))
    graph_module, _ = lowered(make(kind), target="reference")
    recipes = [info(node).recipe for node in graph_module.graph.nodes if info(node).recipe]
    part = "experts.3.down_proj.weight" if kind != "qwen3_5_moe" else "experts.down_proj"
    wanted = rf"tensor 'model\.layers\.1\.mlp\.{part}' holds NaN or inf"
    bad = "model.layers.1.mlp.experts.down_proj", "model.layers.1.mlp.experts.0.down_proj.weight"
    get, recipe = weight_source(model), next(r for r in recipes if r and r.segments[0].name in bad)
    with pytest.raises(CheckpointError, match=wanted):
        load_dense(recipe, get)
