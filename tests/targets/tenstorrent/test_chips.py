"""Weights as chips hold them: packed by the host from their shares, once where they agree."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.targets.tenstorrent.boards import board_precision, programs
from tests.tiny import tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.mesh import COLUMNS, ROWS, Mesh
from tilewright.compiler.targets.tenstorrent.program.chips import (
    PerChip,
    along,
    axes_of,
    load_weight,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram

MESH = Mesh(4, 2)
PATH = "model.layers.0"


def loaded(name: str, model: SimpleNamespace, program: DeviceProgram) -> PerChip:
    weight = next(each for each in program.weights if each.name == name)
    return load_weight(weight, program.mesh, weight_source(model))


@pytest.fixture(scope="module")
def model() -> SimpleNamespace:
    return tiny_model(num_layers=1, hidden_size=96, std=0.3)


@pytest.fixture(scope="module")
def program(model: SimpleNamespace) -> DeviceProgram:
    return programs(model, MESH, precision=board_precision("bfp4"))[1]


def test_lines_of_chips() -> None:
    assert along(MESH, ROWS, (2, 1)) == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert along(MESH, COLUMNS, (2, 1)) == [(2, 0), (2, 1)]


@pytest.mark.parametrize(("axes", "count"), [("", 1), ("r", 4), ("c", 2), ("rc", 8), ("cr", 8)])
def test_what_chips_hold_alike_is_kept_once(axes: str, count: int) -> None:
    per_chip = PerChip(MESH, axes)
    for chip in per_chip.chips():
        per_chip[chip] = torch.tensor(chip)
    assert len(per_chip.parts()) == count
    for row in range(4):
        for column in range(2):
            expected = [row if "r" in axes else 0, column if "c" in axes else 0]
            assert per_chip[row, column].tolist() == expected


def test_a_weight_s_parts_are_shares_of_the_whole(
    model: SimpleNamespace, program: DeviceProgram
) -> None:
    """In the format's values, blocks along out, zeros where the split says so."""
    name = f"{PATH}.mlp.down_proj.weight"
    found = loaded(name, model, program)
    whole = torch.zeros(128, 128)
    whole[:48, :96] = model.checkpoint.tensors[name].t()
    expected = get_format("bfp4").round_trip(whole).bfloat16()
    for (row, column), part in found.parts().items():
        assert part.is_contiguous()
        share = expected[32 * row : 32 * row + 32, 64 * column : 64 * column + 64]
        assert torch.equal(part, share)
    assert len(found.parts()) == 8


def test_merged_heads_are_cut_part_by_part(model: SimpleNamespace, program: DeviceProgram) -> None:
    """Chip 3 has query head 3 and the second key head, as chip 2 has."""
    found = loaded(f"{PATH}.self_attn.q_proj_k_proj_v_proj.weight", model, program)
    parts = {
        kind: model.checkpoint.tensors[f"{PATH}.self_attn.{kind}_proj.weight"] for kind in "qkv"
    }
    expected = torch.cat((parts["q"][48:64], parts["k"][16:32], parts["v"][16:32])).t()[:64]
    expected = get_format("bfp4").round_trip(expected.contiguous()).bfloat16()
    assert torch.equal(found[3, 0], expected)
    assert torch.equal(found[2, 0][:, 16:], expected[:, 16:])
    assert not torch.equal(found[2, 0][:, :16], expected[:, :16])


def test_tables_and_vectors_are_not_turned(model: SimpleNamespace, program: DeviceProgram) -> None:
    tensors = model.checkpoint.tensors
    table = loaded("model.embed_tokens.weight", model, program)
    expected = tensors["model.embed_tokens.weight"].bfloat16()
    assert torch.equal(table[1, 0], expected[:, :64])
    assert torch.equal(table[3, 1][:, :32], expected[:, 64:])
    assert not table[3, 1][:, 32:].any()
    norm = loaded("model.norm.weight", model, program)
    assert torch.equal(norm[0, 0], tensors["model.norm.weight"][:64].bfloat16())


def test_frequencies_stay_float32(model: SimpleNamespace, program: DeviceProgram) -> None:
    found = loaded("model.rotary.inv_freq", model, program)
    assert [part.dtype for part in found.parts().values()] == [torch.float32]
    assert torch.equal(found[0, 0], weight_source(model)("model.rotary.inv_freq"))


def test_partial_sums_differ_from_chip_to_chip(program: DeviceProgram) -> None:
    partial = [axes_of(each.out) for each in program.instructions if each.out.partial]
    assert set(partial) == {"rc", "cr"}
