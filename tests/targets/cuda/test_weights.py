"""A plan's weights: read, held, written, read back, and what of it is refused."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.dealt_models import make as make_dealt
from tests.targets.test_weight_storage import held
from tests.tiny import QWEN2, context_of, lowered, precision_of, tiny_model
from tilewright.compiler.driver import lower_model, weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import weight_bytes
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import unpack
from tilewright.compiler.targets.cuda.weights.stream import (
    Weights,
    load_weights,
    product_of,
    read_weights,
    table_of,
    vector_of,
    wanted_by,
    write_weights,
)
from tilewright.compiler.targets.program.instructions import EmbedOp, KernelProgram
from tilewright.compiler.targets.table import get_target
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError, CompileError, NoRoomError

CPU = torch.device("cpu")
FORMATS = [("bf16", "in"), ("bfp8", "in"), ("bfp4", "in"), ("bfp8", "out"), ("bfp4", "out")]
APART = "*.q_proj: {wqkv: bfp4}, *.up_proj: {ff1_3: bfp4}"


def silent(what: str, done: int, total: int) -> None:
    pass


def plan_of(model: SimpleNamespace, *arguments: str, **changes: str) -> KernelProgram:
    precision = precision_of(*arguments, **{"kv_cache": "bf16", **changes})
    return lower_to_program(lowered(model, target="cuda", precision=precision)[0])


def loaded(model: SimpleNamespace, plan: KernelProgram) -> Weights:
    return load_weights(plan, weight_source(model), CPU, silent)


@pytest.mark.parametrize(("name", "axis"), FORMATS)
def test_values_are_the_format_s_bit_for_bit(name: str, axis: str) -> None:
    model = tiny_model(std=0.2, mlp_bias=True, tie_embeddings=False, vocab_size=64)
    plan = plan_of(model, name, block_axis=axis)
    weights = loaded(model, plan)
    get = weight_source(model)
    for linear in plan.products:
        parts = [get(each) for each in linear.weight.names]
        dense = torch.cat(parts)
        expected = get_format(name).round_trip(dense, axis=-1 if axis == "in" else 0)
        placed = weights.packed(product_of(linear))
        assert placed.kind == (name if axis == "in" else "bf16")
        if linear.swiglu:
            assert placed.is_paired
            expected = expected.view(2, -1, 8, expected.shape[1]).transpose(0, 1).flatten(0, 2)
        assert torch.equal(unpack(placed), expected)
    embed = plan.instructions[0]
    assert isinstance(embed, EmbedOp)
    table = weights.packed(table_of(embed))
    dense = get("model.embed_tokens.weight")
    expected = get_format(name).round_trip(dense, axis=-1 if axis == "in" else 0)
    assert table.kind == "bf16" and torch.equal(unpack(table), expected)


def test_biases_and_norms_stay_float32() -> None:
    model = tiny_model(std=0.2, num_layers=1, attention_bias=True, mlp_bias=True)
    plan = plan_of(model, "bfp4")
    weights, get = loaded(model, plan), weight_source(model)
    qkv, _, gate_up, _, _ = plan.products
    assert qkv.bias is not None and qkv.norm is not None and gate_up.bias is not None
    parts = [get(f"model.layers.0.self_attn.{each}_proj.bias") for each in "qkv"]
    assert torch.equal(weights.vector(vector_of(qkv.bias)), torch.cat(parts))
    norm = get("model.layers.0.input_layernorm.weight")
    assert torch.equal(weights.vector(vector_of(qkv.norm)), norm)
    gate, up = (get(f"model.layers.0.mlp.{each}_proj.bias") for each in ("gate", "up"))
    turns = weights.vector(vector_of(gate_up.bias, is_paired=True)).view(-1, 2, 8)
    assert torch.equal(turns[:, 0].flatten(), gate) and torch.equal(turns[:, 1].flatten(), up)


HELD = {
    "bf16": precision_of("bf16"),
    "blocks": precision_of("bfp8", "hifi2"),
    "blocks along out": precision_of("bfp4", "lofi", block_axis="out"),
    "bf16 table": precision_of("bfp4", "hifi2", embedding="bf16"),
    "mixed": precision_of("bfp8", layers="0: {ff2: bf16, wqkv: bfp4}", ff1_3="bfp2"),
    "apart": precision_of("bfp8", layers=APART),
}
UNTIED = {**QWEN2, "hidden_size": 40, "head_dim": 48, "vocab_size": 131, "tie_embeddings": False}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("changes", [{}, {**UNTIED, "mlp_bias": True}], ids=["tied", "untied"])
def test_what_the_target_says_it_holds_is_what_there_is(changes: dict[str, Any], name: str) -> None:
    """Without the frequencies of rotary embedding. A tied table in bfloat16 twice is one."""
    model = tiny_model(std=0.2, **changes)
    found = held(model, "cuda", HELD[name], "fast")
    plan = lower_to_program(lowered(model, target="cuda", precision=HELD[name])[0])
    memory = loaded(model, plan).num_bytes
    frequencies = 4 * model.config.head_dim // 2
    assert sum(each.num_bytes for each in found) + frequencies == memory
    assert weight_bytes(plan) == memory


def test_parts_that_are_merged_share_a_tile() -> None:
    """Gate and up of 56 rows each: seven tiles together, not twice four."""
    model = tiny_model(std=0.2, num_layers=1, intermediate_size=56)
    found = sum(each.num_bytes for each in held(model, "cuda", HELD["blocks"], "fast"))
    plan = lower_to_program(lowered(model, target="cuda", precision=HELD["blocks"])[0])
    assert found + 4 * 8 == loaded(model, plan).num_bytes
    assert weight_bytes(plan) == loaded(model, plan).num_bytes


@pytest.mark.parametrize(("name", "axis"), FORMATS)
def test_a_folder_holds_what_was_read(name: str, axis: str, tmp_path: Path) -> None:
    model = tiny_model(std=0.2, mlp_bias=True)
    plan = plan_of(model, name, block_axis=axis)
    news: list[tuple[str, int, int]] = []
    write_weights(plan, weight_source(model), tmp_path, lambda *each: news.append(each))
    again = read_weights(plan, tmp_path, CPU, lambda *each: news.append(each))
    expected = loaded(model, plan)
    assert again._placed.keys() == expected._placed.keys()
    for wanted, placed in expected._placed.items():
        other = again._placed[wanted]
        if isinstance(placed, PackedWeight):
            assert isinstance(other, PackedWeight)
            assert (other.kind, other.is_paired) == (placed.kind, placed.is_paired)
            assert torch.equal(other.data, placed.data)
        else:
            assert isinstance(other, torch.Tensor) and torch.equal(other, placed)
    assert again.num_bytes == expected.num_bytes
    count = len(expected._placed)
    assert news == [("weights", done + 1, count) for done in range(count)] * 2
    assert len(list(tmp_path.iterdir())) == count


def test_an_old_order_of_codes_is_refused(tmp_path: Path) -> None:
    model = tiny_model(std=0.2, num_layers=1)
    plan = plan_of(model, "q80")
    write_weights(plan, weight_source(model), tmp_path, silent)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes().replace(b'"halves"', b'"data"  '))
    with pytest.raises(CheckpointError, match="not a weight of this program"):
        read_weights(plan, tmp_path, CPU, silent)


@pytest.fixture
def written(tmp_path: Path) -> tuple[KernelProgram, Path]:
    model = tiny_model(std=0.2, num_layers=1, tie_embeddings=False)
    plan = plan_of(model, "bfp8")
    folder = tmp_path / "program"
    folder.mkdir()
    write_weights(plan, weight_source(model), folder, silent)
    return plan, folder


def file_of(folder: Path, index: int) -> Path:
    return folder / f"weight-{index:05d}.safetensors"


@pytest.mark.parametrize("damage", ["gone", "cut", "empty", "another tensor", "exchanged", "text"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_damaged_files_are_refused(
    written: tuple[KernelProgram, Path], damage: str, index: int
) -> None:
    plan, folder = written
    path = file_of(folder, index)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "another tensor":
        path.write_bytes(data.replace(b'"data"', b'"gate"'))
    elif damage == "exchanged":
        shutil.copy(file_of(folder, (index + 1) % 3), path)
    else:
        path.write_text("weights")
    with pytest.raises(CheckpointError, match=rf"^{path}: not a weight of this program") as caught:
        read_weights(plan, folder, CPU, silent)
    assert "\n" not in str(caught.value)


def test_a_folder_without_room_is_refused(
    written: tuple[KernelProgram, Path], tmp_path: Path
) -> None:
    plan, folder = written
    model = tiny_model(std=0.2, num_layers=1, tie_embeddings=False)
    with pytest.raises(NoRoomError, match="the weights cannot be written") as caught:
        write_weights(plan, weight_source(model), folder / "absent", silent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_formats_that_no_kernel_takes_are_refused(name: str) -> None:
    model = tiny_model(num_layers=1)
    plan = plan_of(model, "bfp8", ff2=name)
    with pytest.raises(CompileError) as caught:
        loaded(model, plan)
    assert str(caught.value) == (
        f"ff2 model.layers.0.mlp.down_proj.weight: format {name} on target cuda, which has no "
        f"kernel for it; allowed: bf16, bfp8, bfp4, bfp2, {', '.join(CODED_TILES)}"
    )
    assert model.checkpoint.reads == [], "before anything is read"


@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize("damage", ["nan", "shape"])
def test_damaged_tensors_are_named(name: str, damage: str) -> None:
    model = tiny_model(num_layers=1)
    which = "model.layers.0.mlp.down_proj.weight"
    if damage == "nan":
        model.checkpoint.tensors[which][3, 3] = float("nan")
        message = r"down_proj\.weight' holds NaN or inf"
    else:
        model.checkpoint.tensors[which] = torch.zeros(32, 47)
        message = rf"{which}.*\[32, 47\]; allowed: \[32, 48\]"
    with pytest.raises(CheckpointError, match=message):
        loaded(model, plan_of(model, name))


@pytest.mark.parametrize(("name", "value"), [("bfp8", 1e38), ("bfp4", 1e37)])
def test_blocks_too_far_apart_are_named(name: str, value: float) -> None:
    model = tiny_model(num_layers=1)
    which = "model.layers.0.mlp.down_proj.weight"
    model.checkpoint.tensors[which][3, 3] = value
    with pytest.raises(CheckpointError) as caught:
        loaded(model, plan_of(model, name))
    message = str(caught.value)
    assert message.startswith(f"{which}: its blocks lie more than ")
    assert message.endswith("allowed: bf16 for it") and "\n" not in message


@pytest.mark.parametrize("name", ["bf16", "bfp8"])
def test_a_rank_reads_no_more_than_it_holds(name: str) -> None:
    """The very weights that it cuts out of whole tensors; of stacked experts too."""
    model = make_dealt("qwen3_5_moe", tie_embeddings=False)
    precision, parallel = precision_of(name, kv_cache="bf16"), ParallelConfig(2, expert=1)
    stages, settings = get_target("cuda").stages(), context_of(model, precision).precision
    for rank in range(2):
        graph_module, _ = lower_model(model, settings, stages, silent, parallel=parallel, rank=rank)
        plan = lower_to_program(graph_module)
        whole = loaded(model, plan)
        before = model.checkpoint.num_bytes
        parts = load_weights(plan, weight_source(model, None, parallel), CPU, silent)
        read = model.checkpoint.num_bytes - before
        recipes = [each.recipe for each in wanted_by(plan)]
        assert read <= 1.05 * sum(4 * math.prod(recipe.shape) for recipe in recipes)
        for each in wanted_by(plan):
            left, right = (source._placed[each] for source in (whole, parts))
            pair = [x.data if isinstance(x, PackedWeight) else x for x in (left, right)]
            assert torch.equal(*pair), each.recipe.names[:2]
