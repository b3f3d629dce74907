"""Boards deal what ranks deal, in the same words: padded shares, and a stream over two axes."""

from __future__ import annotations

import pytest

from tests.targets.tenstorrent.boards import board_precision
from tests.tiny import lowered, tiny_model
from tilewright.compiler.driver import lower_model, resolve_precision
from tilewright.compiler.ir.info import WHOLE, info
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent.program.placements import IN, OUT, Placements
from tilewright.distributed.parallel import ParallelConfig

PRECISION = board_precision("bf16")


def board_places(mesh: Mesh) -> Placements:
    graph_module, _ = lowered(tiny_model(num_layers=1), target="n150", precision=PRECISION)
    return Placements(graph_module, mesh)


def axes_by_group(places: Placements) -> dict[str, set[tuple[str, str]]]:
    """Of every tensor group's products: which axes are dealt, and over which mesh axis."""
    found: dict[str, set[tuple[str, str]]] = {}
    for weight, placement in places.weights.items():
        group, is_product = info(weight).tensor_group, weight.meta["val"].dim() == 2
        if group is not None and group != "embedding" and is_product:
            names = {IN: "in", OUT: "out"}
            found[group] = {(names[each.axis], each.over) for each in placement.sharded}
    return found


def test_a_board_of_two_chips_deals_the_axes_that_two_ranks_deal() -> None:
    model, target = tiny_model(num_layers=1), get_target("reference")
    _, ctx = lower_model(
        model,
        resolve_precision(model, PRECISION),
        target.stages(),
        silent,
        parallel=ParallelConfig(2, wire="fp32"),
    )
    ranks: dict[str, set[tuple[str, str]]] = {}
    for group, axis, _ in ctx.places:
        ranks.setdefault(group, set()).add((axis, "r"))
    # a vocabulary of 61 is whole on two ranks of 16 rows at least, or padded
    board = axes_by_group(board_places(Mesh(2)))
    assert {**ranks, "lm_head": {("out", "r")}} == board


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (Mesh(), {"wqkv": set(), "wo": set(), "ff1_3": set(), "ff2": set(), "lm_head": set()}),
        (
            Mesh(2, 2),
            {
                "wqkv": {("in", "c"), ("out", "r")},
                "wo": {("in", "r"), ("out", "c")},
                "ff1_3": {("in", "c"), ("out", "r")},
                "ff2": {("in", "r"), ("out", "c")},
                "lm_head": {("in", "c"), ("out", "r")},
            },
        ),
    ],
)
def test_a_stream_of_two_axes_is_dealt_too(
    mesh: Mesh, expected: dict[str, set[tuple[str, str]]]
) -> None:
    places = board_places(mesh)
    assert axes_by_group(places) == expected
    products = [node for node in places.made if info(node).tensor_group in expected]
    for node in products:
        inputs = places.read(node.args[0]).along(OUT)
        assert places.made[node].partial == ("" if inputs is None else inputs.over)
        assert places.read(node).partial == "" and (places.read(node) == WHOLE or mesh.rows > 1)
