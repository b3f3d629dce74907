"""Weights of experts are held one by one, as each would be alone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.models import test_qwen3_5_moe, test_qwen3_moe
from tests.targets.test_weight_storage import ask_for
from tests.tiny import FakeCheckpoint, lowered, precision_of
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import Segment, WeightRecipe, take
from tilewright.compiler.mesh import IndexRange
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import weight_bytes
from tilewright.compiler.targets.cuda.weights import experts
from tilewright.compiler.targets.cuda.weights.experts import place_experts
from tilewright.compiler.targets.cuda.weights.packing import unpack
from tilewright.compiler.targets.cuda.weights.stream import (
    load_weights,
    product_of,
    read_weights,
    write_weights,
)
from tilewright.compiler.targets.program.instructions import ExpertLinearOp, ExpertSum
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError

CPU = torch.device("cpu")


def silent(what: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("make", [test_qwen3_moe.make, test_qwen3_5_moe.make])
@pytest.mark.parametrize(("name", "axis"), [("bf16", "in"), ("bfp4", "in"), ("bfp8", "out")])
def test_values_are_the_format_s_and_come_back_from_files(
    make: object, name: str, axis: str, tmp_path: Path
) -> None:
    """Stacked or a tensor an expert; where blocks run along out, gate and up stay apart."""
    assert callable(make)
    model = make()
    precision = precision_of(name, block_axis=axis)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision)[0])
    get = weight_source(model)
    weights = load_weights(plan, get, CPU, silent)
    write_weights(plan, get, tmp_path, silent)
    back = read_weights(plan, tmp_path, CPU, silent)
    count = 0
    for each in plan.instructions:
        if not isinstance(each, ExpertLinearOp | ExpertSum):
            continue
        held, again = (source.packed(product_of(each)) for source in (weights, back))
        assert torch.equal(held.data, again.data) and held.num_experts == again.num_experts == 6
        dense = torch.stack([_values(get, each.weight, expert) for expert in range(6)])
        want = get_format(name).round_trip(dense, axis=-1 if axis == "in" else -2)
        if held.is_paired:
            want = want.unflatten(1, (2, -1, 8)).transpose(1, 2)
        assert torch.equal(unpack(held), want.reshape(-1, want.shape[-1]))
        count += 1
    num_sparse = model.config.num_layers - len(model.config.dense_layers)
    assert count == num_sparse * (2 if axis == "in" else 3)
    assert weight_bytes(plan) == weights.num_bytes


def _values(get: object, recipe: WeightRecipe, expert: int) -> torch.Tensor:
    """One expert's rows, cut by hand."""
    assert callable(get)
    parts = []
    for segment in recipe.segments:
        tensor = get(segment.name).flatten(0, -2)
        parts.append(tensor if segment.rows is None else tensor[slice(*segment.rows)])
    return torch.cat(parts).view(recipe.shape)[expert]


def test_one_scale_holds_all_experts() -> None:
    """The third expert's values are too large for the others' exponents."""
    dense = torch.randn(4, 16, 32)
    dense[2] *= 2.0**5
    recipe = WeightRecipe((Segment("w", 64),), (4, 16, 32), "bfp8")
    asked = []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return dense

    seen: list[float] = []

    def check(values: torch.Tensor, scale: float, names: object) -> None:
        seen.append(scale)

    held = place_experts(recipe, "bfp8", get, CPU, paired=False, check=check)
    assert asked == ["w"]
    assert held.scale > 1 and seen[-4:] == [held.scale] * 4
    want = get_format("bfp8").round_trip(dense, axis=-1).flatten(0, 1)
    assert torch.equal(unpack(held), want)


def test_stacks_of_gate_and_up_are_each_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are converted one at a time, and need rows of both tensors."""
    monkeypatch.setattr(experts, "_TOGETHER", 1)
    stacks, requested = {name: torch.randn(3, 16, 32) for name in ("gate", "up")}, []

    def get(name: str) -> torch.Tensor:
        requested.append(name)
        return stacks[name]

    segments = (
        Segment(name, 16, (16 * expert, 16 * expert + 16)) for expert in range(3) for name in stacks
    )
    recipe = WeightRecipe(tuple(segments), (3, 32, 32), "bfp8")
    place_experts(recipe, "bfp8", get, CPU, paired=True, check=lambda *_: None)
    assert requested == ["gate", "up"]


def test_an_expert_that_kernels_do_not_take_is_named() -> None:
    model = test_qwen3_moe.make()
    plan = lower_to_program(lowered(model, target="cuda", precision=precision_of("bfp4"))[0])
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    model.checkpoint.tensors[name][0] = 3e-38
    with pytest.raises(CheckpointError, match=r"experts.3.up_proj.weight.*allowed: bf16") as caught:
        load_weights(plan, weight_source(model), CPU, silent)
    assert "experts.2" not in str(caught.value)


def test_bytes_are_told_without_building() -> None:
    """Each expert's rows are whole tiles."""
    assert ask_for("cuda", (3, 24, 32), "bf16", group="experts_ff2").num_bytes == (
        3 * 2 * 16 * 128 * 2
    )
    held = ask_for("cuda", (3, 24, 32), "bfp4", group="experts_ff2")
    assert held.num_bytes == 3 * 2 * 1152


@pytest.mark.parametrize(("kind", "rows"), [("bf16", 48), ("bf16", 20), ("bfp4", 48), ("bfp8", 20)])
@pytest.mark.parametrize("paired", [False, True])
def test_a_rank_s_experts_are_held_alike_however_many_are_converted_together(
    kind: str, rows: int, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of five experts, the third of which needs another scale, the rows that a rank has of both
    halves, or its columns.
    """
    dense = torch.randn(5, 2 * rows, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense[2] *= 2.0**5
    source = weight_source(
        SimpleNamespace(  # type: ignore[arg-type]
            checkpoint=FakeCheckpoint({"w": dense}),
            module=SimpleNamespace(sources=dict, constants=lambda most: {}),
        ),
        None,
        ParallelConfig(tensor=2),
    )
    whole = WeightRecipe((Segment("w", 10 * rows),), (5, 2 * rows, 64), kind)
    halves = (IndexRange(rows // 2, rows // 2), IndexRange(rows + rows // 2, rows // 2))
    part = take(whole, {1: halves} if paired else {2: (IndexRange(32, 32),)})
    found = []
    for together in (1, 2 * 2 * rows * 64, 1 << 24):
        monkeypatch.setattr(experts, "_TOGETHER", together)
        check = lambda *given: None  # noqa: E731
        found.append(place_experts(part, kind, source, CPU, paired=paired, check=check))
    want = torch.cat([dense[:, run.start : run.start + run.count] for run in halves], 1)
    want = want.float() if paired else dense[:, :, 32:].float()
    if paired and rows == 48:
        turned = get_format(kind).round_trip(want, axis=-1).unflatten(1, (2, -1, 8))
        assert torch.equal(unpack(found[0]), turned.transpose(1, 2).reshape(-1, 64))
    elif not paired:
        turned = get_format(kind).round_trip(want, axis=-1)
        assert torch.equal(unpack(found[0]), turned.reshape(-1, 32))
    for each in found:
        assert torch.equal(each.data, found[0].data) and each.scale == found[0].scale
