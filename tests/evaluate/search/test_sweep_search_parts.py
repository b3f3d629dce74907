"""What parts cost and win at each level: shares of their groups' losses, predicted savings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.evaluate.sweep.planted import asked
from tests.tiny import precision_of, tiny_model
from tilewright.compiler.precision import load_precision
from tilewright.evaluate.search.candidates import (
    BASE_OPTION,
    LevelOption,
    StoredBytes,
    groups_without_shares,
    part_options,
)
from tilewright.evaluate.search.levels import Level, SweepUnit
from tilewright.evaluate.sweep.cost_model import CostModel
from tilewright.evaluate.sweep.model import SweptModel, swept_model
from tilewright.evaluate.sweep.sensitivity import Lowered, Sensitivity
from tilewright.evaluate.sweep.summary import SweptRow

BFP8, BFP4 = Level.parse("bfp8"), Level.parse("bfp4")
FF2 = [SweepUnit("ff2", layer) for layer in range(2)]
HEAD = SweepUnit("lm_head")
HELD: dict[Level | None, StoredBytes] = {
    None: {
        ("ff2", 0, "dense"): 1000,
        ("ff2", 1, "dense"): 1000,
        ("lm_head", None, "dense"): 3000,
        ("embedding", None, "dense"): 9000,
    },
    BFP8: {
        ("ff2", 0, "blocks"): 300,
        ("ff2", 1, "blocks"): 300,
        ("lm_head", None, "blocks"): 900,
        ("embedding", None, "dense"): 9000,
    },
    BFP4: {
        ("ff2", 0, "blocks"): 200,
        ("ff2", 1, "strange"): 200,
        ("lm_head", None, "blocks"): 4000,
        ("embedding", None, "dense"): 9000,
    },
}
COSTS = CostModel(5.0, {"dense": 0.01, "blocks": 0.02}, {})
LOSSES = {
    ("ff2", BFP8): 0.1,
    ("ff2", BFP4): 0.9,
    ("lm_head", BFP8): 0.2,
    ("lm_head", BFP4): 0.3,
}


def swept(**changes: Any) -> SweptModel:
    loaded = tiny_model(**changes)
    loaded.checkpoint.content_hash = lambda: "hash"
    return swept_model(loaded, "tiny")


def lowered(part: str, kl_lost: float, kl_error: float = 0.0) -> Lowered:
    return Lowered(part, part, kl_lost, kl_error, 0.0, None, 0, None, None, False)


def sensitivity(*parts: Lowered) -> Sensitivity:
    return Sensitivity(SweptRow(("a",), (), {}, {}, None, {}), parts, None)


def items(
    *parts: Lowered, losses: Mapping[tuple[str, Level], float] = LOSSES
) -> dict[SweepUnit, dict[Level | None, LevelOption]]:
    found = part_options([*FF2, HEAD], sensitivity(*parts), losses, HELD, COSTS)
    assert list(found) == [*FF2, HEAD]
    assert all(options[0] == BASE_OPTION for options in found.values())
    return {part: {option.level: option for option in found[part]} for part in found}


def test_single_parts_are_every_group_of_every_layer_and_the_head() -> None:
    found = asked(swept(num_layers=3)).parts()
    assert set(found) == {
        *(
            SweepUnit(group, layer)
            for group in ("ff1_3", "ff2", "wqkv", "wo")
            for layer in range(3)
        ),
        HEAD,
    }
    assert len(found) == 4 * 3 + 1


def test_a_layer_has_its_share_of_what_its_group_lost() -> None:
    found = items(lowered("0.ff2", 0.03), lowered("1.ff2", 0.01), lowered("lm_head", 0.5))
    for level, loss in ((BFP8, 0.1), (BFP4, 0.9)):
        assert found[FF2[0]][level].kl_lost == pytest.approx(0.75 * loss)
    assert found[FF2[1]][BFP8].kl_lost == pytest.approx(0.25 * 0.1)
    assert found[HEAD][BFP8].kl_lost == pytest.approx(0.2)


def test_layers_that_were_not_all_measured_share_alike() -> None:
    for measured in ((), (lowered("0.ff2", 0.03),)):
        found = items(*measured)
        assert found[FF2[0]][BFP8].kl_lost == found[FF2[1]][BFP8].kl_lost == pytest.approx(0.05)
        assert found[HEAD][BFP8].kl_lost == pytest.approx(0.2)


def test_groups_whose_layers_were_not_all_measured_are_named() -> None:
    parts = [*FF2, HEAD, SweepUnit("wo", 0), SweepUnit("wo", 1)]
    measured = [lowered(str(part), 0.1) for part in parts]
    assert groups_without_shares(parts, sensitivity(*measured)) == []
    assert groups_without_shares(parts, sensitivity(*measured[1:4])) == ["ff2", "wo"]
    assert groups_without_shares(parts, sensitivity()) == ["ff2", "lm_head", "wo"]


def test_time_is_predicted_and_bytes_are_counted() -> None:
    found = items()
    assert found[FF2[0]][BFP8].ms_saved == pytest.approx(1000 * 0.01 - 300 * 0.02)
    assert found[FF2[0]][BFP8].bytes_saved == 700
    assert found[HEAD][BFP4].ms_saved == pytest.approx(3000 * 0.01 - 4000 * 0.02)
    assert found[HEAD][BFP4].bytes_saved == -1000


def test_what_cannot_be_predicted_is_no_option() -> None:
    """Neither a holding that was never timed, nor a level the group was not measured at."""
    found = items()
    assert set(found[FF2[0]]) == {None, BFP8, BFP4}
    assert set(found[FF2[1]]) == {None, BFP8}
    without = {key: loss for key, loss in LOSSES.items() if key != ("ff2", BFP8)}
    assert set(items(losses=without)[FF2[1]]) == {None}


def test_a_group_that_lost_nothing_costs_nothing() -> None:
    found = items(losses={**LOSSES, ("ff2", BFP8): -0.01})
    assert found[FF2[0]][BFP8].kl_lost == 0.0
    assert found[FF2[0]][BFP8].ms_saved > 0


def test_shares_of_a_group_add_up_to_it() -> None:
    found = items(lowered("0.ff2", -1.0, 0.5), lowered("1.ff2", 0.0, 0.25))
    losses = [found[part][BFP8].kl_lost for part in FF2]
    assert sum(losses) == pytest.approx(0.1) and losses[0] == pytest.approx(2 * losses[1])


def test_all_parts_of_a_model_save_what_the_whole_saves() -> None:
    model = swept(tie_embeddings=False)
    base = model.stored_bytes(model.resolve(load_precision("bf16")), "cpu")
    low = precision_of("bfp8", "hifi2", embedding="bf16")
    held: dict[Level | None, StoredBytes] = {
        None: base,
        BFP8: model.stored_bytes(model.resolve(low), "cpu"),
    }
    parts = asked(model).parts()
    losses = {(part.group, BFP8): 0.1 for part in parts}
    costs = CostModel(1.0, {"float32": 1e-6, "bfp8 blocks": 2e-6}, {})
    found = part_options(parts, sensitivity(), losses, held, costs)
    saved = sum(options[1].bytes_saved for options in found.values())
    assert saved == sum(base.values()) - sum(held[BFP8].values()) > 0
