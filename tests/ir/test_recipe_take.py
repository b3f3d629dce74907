"""A rank's part of a weight: its rows and columns alone are read, and no block is made again."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.dealt_models import COUNTS, dealt, make
from tests.dllama_files import tokenizer_bytes, tokens
from tests.ggml_blocks import SHAPES, random_blocks, write_llama
from tests.models.test_dllama import write as write_dllama
from tests.tiny import precision_of
from tilewright.compiler.driver import (
    CompilableModel,
    lower_model,
    resolve_precision,
    weight_source,
)
from tilewright.compiler.formats import FORMATS, STORED_NAMES, get_format, stored_format
from tilewright.compiler.formats.ggml_blocks import SIZES
from tilewright.compiler.ir.info import WEIGHT, Sharding, info
from tilewright.compiler.ir.recipe import (
    Segment,
    WeightRecipe,
    load_dense,
    load_rows,
    load_stored,
    load_values,
    take,
)
from tilewright.compiler.mesh import IndexRange
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.passes.sharding.shard import shard
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION
from tilewright.distributed.parallel import ParallelConfig, RankAxes
from tilewright.errors import CompileError
from tilewright.models import LoadedModel, load_model

QUANTISED = [name for name in FORMATS if get_format(name).is_offered and name[0] != "q"]
TENSORS = {"a": torch.randn(12, 8), "b": torch.randn(4, 6, 8)}
RECIPE = WeightRecipe(
    (Segment("a", 6, rows=(6, 12), offset=1.0), Segment("b", 18, rows=(0, 18))), (4, 6, 8)
)


class Parts:
    """A source of tensors that reads parts, and counts what it reads."""

    def __init__(self) -> None:
        self.whole: list[str] = []
        self.num_values = 0

    def __call__(self, name: str) -> Tensor:
        self.whole.append(name)
        return TENSORS[name]

    def part(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> Tensor:
        tensor = TENSORS[name] if rows is None else TENSORS[name].flatten(0, -2)[slice(*rows)]
        found = tensor if columns is None else tensor[..., slice(*columns)]
        self.num_values += found.numel()
        return found


@pytest.mark.parametrize(
    "kept",
    [
        {0: [IndexRange(1, 2)]},
        {1: [IndexRange(0, 2), IndexRange(4, 1)]},
        {2: [IndexRange(2, 3), IndexRange(7, 1)]},
        {0: [IndexRange(0, 1), IndexRange(3, 1)], 1: [IndexRange(3, 3)], 2: [IndexRange(4, 4)]},
        {0: [IndexRange(2, 1)]},
    ],
)
def test_a_part_is_taken_along_every_axis(kept: dict[int, list[IndexRange]]) -> None:
    expected = load_dense(RECIPE, TENSORS.__getitem__)
    for axis, runs in kept.items():
        indices = torch.cat([torch.arange(run.start or 0, run.end) for run in runs])
        expected = expected.index_select(axis, indices)
    part = take(RECIPE, kept)
    assert part.shape == tuple(expected.shape)
    assert sum(segment.num_rows for segment in part.segments) == part.num_rows
    assert torch.equal(load_dense(part, TENSORS.__getitem__), expected)
    source = Parts()
    assert torch.equal(load_dense(part, source), expected)
    assert not source.whole
    assert source.num_values == expected.numel()


def test_rows_that_follow_one_another_stay_one_segment() -> None:
    part = take(RECIPE, {0: [IndexRange(2, 2)], 1: [IndexRange(0, 6)]})
    assert part.segments == (Segment("b", 12, rows=(6, 18)),)
    whole = WeightRecipe((Segment("a", 12),), (12, 8))
    assert take(whole, {1: [IndexRange(0, 4)]}).segments == whole.segments
    half = take(whole, {0: [IndexRange(0, 6)], 1: [IndexRange(4, 4)]})
    rows = load_rows(half, Parts(), 2, 5)  # type: ignore[arg-type]
    assert torch.equal(rows, TENSORS["a"][2:5, 4:])


Found = list[tuple[WeightRecipe, Sharding]]


def parts_of(model: SimpleNamespace | CompilableModel, count: int, nodes: Found) -> None:
    """Every rank's values of every weight are those of one device, bit for bit."""
    whole, ranks = weight_source(model), RankAxes(count, 1, ParallelConfig(count).policy)
    own = weight_source(model, None, ParallelConfig(count))
    for recipe, placement in nodes:
        expected = load_values(recipe, whole)
        for rank in range(count):
            part, found = (
                expected,
                take(
                    recipe,
                    {d.axis: d.split.shares[ranks.place(d.over, rank)] for d in placement.sharded},
                ),
            )
            for each in placement.sharded:
                part = each.split.take(part, each.axis, ranks.place(each.over, rank))
            assert torch.equal(load_values(found, own), part), recipe.names


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("name", [*QUANTISED, "q40", "q80"])
def test_pieces_are_the_values_of_one_device(name: str, axis: str) -> None:
    sizes = {"num_kv_heads": 8, "head_dim": 32, "num_layers": 1, "intermediate_size": 264}
    if name == "fp8":  # blocks of 128
        sizes |= {"head_dim": 128, "intermediate_size": 1152}
    model = make(**sizes)
    precision = precision_of(name, block_axis=axis, kv_cache="fp32", embedding="fp32")
    for count in COUNTS:
        graph_module, _ = dealt(model, ParallelConfig(count), precision=precision)
        facts = [info(node) for node in graph_module.graph.nodes]
        found = [(f.recipe, f.placement) for f in facts if f.recipe and f.placement]
        assert sum(bool(placement.sharded) for _, placement in found) >= 7
        parts_of(model, count, found)


def of_file(model: LoadedModel, count: int) -> Found:
    """The weights of a file as it stores them, and how ranks deal them."""
    resolved = resolve_precision(model, load_precision("stored"))
    graph_module, ctx = lower_model(model, resolved, [MATCH, PRECISION], silent)
    ctx.parallel = ParallelConfig(count)
    run_passes(graph_module, [shard], ctx)
    facts = [info(node) for node in graph_module.graph.nodes]
    return [(f.recipe, f.placement) for f in facts if f.recipe and f.placement]


@pytest.mark.parametrize(
    "dtype", [*(name for name, (block, _) in SIZES.items() if block <= 32), "BF16"]
)
def test_blocks_of_a_gguf_file_stay_as_they_are(dtype: str, tmp_path: Path) -> None:
    model = load_model(
        write_llama(tmp_path / "typed.gguf", dict.fromkeys(SHAPES, dtype), embedding=dtype)
    )
    held = stored_format(dtype)
    in_blocks = held is not None and get_format(held).block > 1
    for count in (2, 3, 4):
        found = of_file(model, count)
        assert {recipe.is_stored for recipe, place in found if place.sharded} == {in_blocks}
        parts_of(model, count, found)


def test_blocks_of_256_are_refused_where_heads_are_smaller(tmp_path: Path) -> None:
    types = dict.fromkeys(SHAPES, "F32") | {"self_attn.o_proj": "Q4_K"}
    model = load_model(write_llama(tmp_path / "typed.gguf", types, embedding="F32"))
    with pytest.raises(CompileError) as caught:
        of_file(model, 2)
    assert str(caught.value) == (
        "model.layers.0.self_attn: key/value heads: 2 in blocks of 2 are 1, over 2 ranks; "
        "allowed: at most 1 ranks, or formats with smaller blocks"
    )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F32"])
def test_blocks_of_a_dllama_file_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    path = write_dllama(tmp_path / "dllama_model_tiny.m", kind=kind)
    path.with_suffix(".t").write_bytes(tokenizer_bytes(tokens(special_first=True)))
    model = load_model(path)
    found = of_file(model, 2)
    assert sum(bool(place.sharded) for _, place in found) >= 8
    parts_of(model, 2, found)


@pytest.mark.parametrize("dtype", [name for name in SIZES if name in STORED_NAMES.values()])
def test_columns_of_stored_bytes_are_whole_blocks(dtype: str) -> None:
    block, num_bytes = SIZES[dtype]
    data = torch.from_numpy(random_blocks(dtype, 4 * 3)).reshape(4, 3 * num_bytes)
    name = str(stored_format(dtype))
    whole = WeightRecipe((Segment("w", 4),), (4, 3 * block), name, is_stored=True)
    part = take(whole, {1: [IndexRange(block, 2 * block)]})
    source = SimpleNamespace(stored=lambda name, first, last: data[first:last])
    found = load_stored(part, source, 1, 3)
    assert torch.equal(found, data[1:3, num_bytes:])


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_moe"])
def test_no_more_is_read_than_is_kept(model_type: str) -> None:
    """Of a checkpoint that has every expert in a tensor of its own, and of one of stacks."""
    model = make(model_type, tie_embeddings=False)
    for rank in range(4):
        graph_module, _ = dealt(model, ParallelConfig(4), rank=rank)
        recipes = {info(n).recipe for n in graph_module.graph.nodes if info(n).role == WEIGHT}
        kept = sum(4 * math.prod(recipe.shape) for recipe in recipes if recipe is not None)
        before, source = model.checkpoint.num_bytes, weight_source(model, None, ParallelConfig(4))
        for recipe in recipes:
            assert recipe is not None
            load_values(recipe, source)
        assert model.checkpoint.num_bytes - before <= 1.05 * kept
