"""Parts, levels, and configurations made of them: exactly what was chosen, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.formats import FIDELITIES, FORMATS
from tilewright.compiler.precision import (
    FOLLOWS,
    OP_FAMILIES,
    OP_GROUP_OF,
    PHASES,
    TENSOR_GROUPS,
    PrecisionConfig,
    ResolvedPrecision,
    load_precision,
    parse_heading,
)
from tilewright.errors import ConfigError
from tilewright.evaluate.search.levels import PRODUCT_GROUPS, Level, SweepUnit, assign, rank

NUM_LAYERS = 4
IN_LAYERS = ("ff1_3", "ff2", "wqkv", "wo", "kv_cache", "activation")
PARTS = [
    *(SweepUnit(group) for group in (*IN_LAYERS, "lm_head", "embedding")),
    *(SweepUnit(group, layer) for group in IN_LAYERS for layer in range(NUM_LAYERS)),
]
OFFERED = [name for name in FORMATS if FORMATS[name].is_offered]
LEVELS = [Level(form, fidelity) for form in OFFERED for fidelity in FIDELITIES]
FAMILIES = {
    "li_ff1_3": "ff1_3",
    "li_ff2": "ff2",
    "li_qkv": "wqkv",
    "li_o": "wo",
    "li_lm_head": "lm_head",
}
"""The tensor group whose level a product has; attention's has none."""
BASES = [
    "bf16",
    "base",
    "performance",
    "precision_cfg = {ff2: bfp4}, fidelity_cfg = {li_ff2: lofi}, block_axis = out",
    "precision_cfg = {experts_ff1_3: fp16}, fidelity_cfg = {li_ff1_3_prefill: hifi3}",
    "precision_cfg = {wo: bf16}, fidelity_cfg = {sdpa_decode: hifi4}, "
    "layer_cfg = {1-2: {ff2: bfp4, li_ff2: lofi, wqkv: q40}, 3: {li_ff1_3_decode: hifi3, "
    "kv_cache: bf16}, 0: {wo: bfp4, li_o_prefill: lofi}}",
]


@st.composite
def choices(draw: st.DrawFn) -> dict[SweepUnit, Level]:
    """Levels of some parts, of all layers or of one, in any order."""
    parts = draw(st.lists(st.sampled_from(PARTS), unique=True, max_size=8))
    return {
        part: draw(st.sampled_from([level for level in LEVELS if level.is_for(part.group)]))
        for part in parts
    }


def wanted(chosen: Mapping[SweepUnit, Level], group: str, layer: int | None) -> Level | None:
    """What a part was chosen to have: a single layer's choice beats one for all layers."""
    return chosen.get(SweepUnit(group, layer), chosen.get(SweepUnit(group)))


def formats(resolved: ResolvedPrecision) -> dict[tuple[str, int | None], str]:
    """Of every group in every layer, the groups outside layers once."""
    outside = ("lm_head", "embedding")
    found = {(group, None): resolved.format(group) for group in outside}
    return found | {
        (group, layer): resolved.format(group, layer=layer)
        for group in TENSOR_GROUPS
        if group not in outside
        for layer in range(NUM_LAYERS)
    }


@given(st.sampled_from(BASES), choices())
def test_parts_have_what_was_chosen_and_the_rest_what_the_base_has(
    base_name: str, chosen: dict[SweepUnit, Level]
) -> None:
    base = load_precision(base_name)
    before = base.resolve(NUM_LAYERS)
    after = assign(base, chosen, name="x", num_layers=NUM_LAYERS).resolve(NUM_LAYERS)
    expected = formats(before)
    for group, layer in expected:
        level = wanted(chosen, group, layer)
        if group in FOLLOWS and group not in base.precision:
            level = wanted(chosen, FOLLOWS[group], layer)
        if level is not None:
            expected[group, layer] = level.format
    assert formats(after) == expected
    for family in OP_FAMILIES:
        for phase in PHASES:
            for layer in (None,) if family == "li_lm_head" else range(NUM_LAYERS):
                own = FAMILIES.get(family)
                level = None if own is None else wanted(chosen, own, layer)
                usual = before.fidelity(family, phase, layer=layer)
                found = after.fidelity(family, phase, layer=layer)
                assert found == (usual if level is None else level.fidelity), (family, phase)
    assert after.block_axis == before.block_axis


@given(st.sampled_from(BASES), choices())
def test_the_heading_says_the_same(base_name: str, chosen: dict[SweepUnit, Level]) -> None:
    """It is what a cell's run is given instead of the configuration."""
    made = assign(load_precision(base_name), chosen, name="x", num_layers=NUM_LAYERS)
    resolved = made.resolve(NUM_LAYERS)
    assert parse_heading(resolved.heading()).resolve(NUM_LAYERS).id == resolved.id


PLACES = {
    "router": range(NUM_LAYERS),
    "delta_gates": (0, 1, 2),
    "delta_in": (0, 1, 2),
    "delta_out": (0, 1, 2),
    "wqkv": (3,),
    "wo": (3,),
    "ff1_3": (0,),
    "ff2": (0,),
    "experts_ff1_3": (1, 2, 3),
    "experts_ff2": (1, 2, 3),
    "shared_ff1_3": (1, 2, 3),
    "shared_ff2": (1, 2, 3),
    "lm_head": (),
}
"""A hybrid mixture of experts whose first layer is dense."""


@st.composite
def hybrid_choices(draw: st.DrawFn) -> dict[SweepUnit, Level]:
    parts = [SweepUnit(group) for group in PLACES]
    parts += [SweepUnit(group, layer) for group, layers in PLACES.items() for layer in layers]
    chosen = draw(st.lists(st.sampled_from(parts), unique=True, max_size=8))
    return {
        part: draw(st.sampled_from([level for level in LEVELS if level.is_for(part.group)]))
        for part in chosen
    }


@given(st.sampled_from(BASES), hybrid_choices())
def test_no_part_of_a_model_lowers_another(base_name: str, chosen: dict[SweepUnit, Level]) -> None:
    """Every group has its own format or the base's; products the highest fidelity of those that
    share it: a group that nobody chose has no less than in the base.
    """
    base = load_precision(base_name)
    before = base.resolve(NUM_LAYERS)
    made = assign(base, chosen, name="x", num_layers=NUM_LAYERS, groups=PLACES)
    after = made.resolve(NUM_LAYERS)
    for group, layers in PLACES.items():
        for layer in layers:
            level = wanted(chosen, group, layer)
            usual = before.format(group, layer=layer)
            assert after.format(group, layer=layer) == (level.format if level else usual)
    for layer in range(NUM_LAYERS):
        here = [group for group, layers in PLACES.items() if layer in layers]
        for family in {OP_GROUP_OF[group] for group in here if group in OP_GROUP_OF}:
            sharing = [wanted(chosen, g, layer) for g in here if OP_GROUP_OF.get(g) == family]
            for phase in PHASES:
                usual = before.fidelity(family, phase, layer=layer)
                asked = [level.fidelity if level else usual for level in sharing]
                found = after.fidelity(family, phase, layer=layer)
                assert found in asked and rank(found) == max(map(rank, asked))
    assert parse_heading(after.heading()).resolve(NUM_LAYERS).id == after.id


@given(hybrid_choices(), st.randoms(use_true_random=False))
def test_the_order_of_parts_that_share_products_does_not_matter(
    chosen: dict[SweepUnit, Level], random: Random
) -> None:
    items = list(chosen.items())
    random.shuffle(items)
    base = load_precision("bf16")
    ids = {
        assign(base, each, name="x", num_layers=NUM_LAYERS, groups=PLACES).resolve(NUM_LAYERS).id
        for each in (chosen, dict(items))
    }
    assert len(ids) == 1


def test_a_model_of_neither_experts_nor_gates_is_as_without_its_groups() -> None:
    """What has been recorded of dense models stays valid."""
    base = load_precision("bf16")
    dense = {group: range(NUM_LAYERS) for group in ("wqkv", "wo", "ff1_3", "ff2")}
    for part in (SweepUnit("ff1_3"), SweepUnit("wqkv", 2)):
        choice = {part: Level.parse("bfp4")}
        ids = {
            assign(base, choice, name="x", num_layers=NUM_LAYERS, groups=groups)
            .resolve(NUM_LAYERS)
            .heading()
            for groups in ({}, {**dense, "lm_head": (), "embedding": ()})
        }
        assert len(ids) == 1 and "experts" not in ids.pop()


def test_a_follower_keeps_what_the_base_has_for_this_model() -> None:
    base = load_precision("accuracy")
    choice = {SweepUnit("wqkv"): Level.parse("bfp4")}
    groups = {"wqkv": (1,), "delta_in": (0,)}
    for name in ("Llama3-8B", None):
        made = assign(base, choice, name="x", num_layers=2, groups=groups, model_name=name)
        before, after = base.resolve(2, name), made.resolve(2, name)
        assert after.format("delta_in", layer=0) == before.format("delta_in", layer=0)
        assert after.format("wqkv", layer=1) == "bfp4"


def test_fidelities_have_a_total_order() -> None:
    found = sorted(FIDELITIES, key=rank)
    assert found == ["lofi", "hifi2na", "hifi2fp16", "hifi2", "hifi3", "hifi4", "hifi4fp32"]
    assert len({rank(name) for name in FIDELITIES}) == len(FIDELITIES)


def test_the_order_of_choices_does_not_matter() -> None:
    base = load_precision("bf16")
    one, all_layers = (
        (SweepUnit("ff2", 1), Level.parse("bfp4")),
        (SweepUnit("ff2"), Level.parse("bfp8")),
    )
    ids = {
        assign(base, dict(order), name="x", num_layers=3).resolve(3).id
        for order in ((one, all_layers), (all_layers, one))
    }
    assert len(ids) == 1


def test_the_only_layer_is_a_layer() -> None:
    choice = {SweepUnit("ff2"): Level.parse("bfp8"), SweepUnit("ff2", 0): Level.parse("bfp4")}
    made = assign(load_precision("bf16"), choice, name="x", num_layers=1)
    assert made.resolve(1).format("ff2", layer=0) == "bfp4"


def test_exceptions_for_a_model_do_not_come_through() -> None:
    base = load_precision("accuracy")
    assert base.resolve(2, "Llama3-8B").fidelity("li_ff2", "decode") == "hifi2fp16"
    made = assign(base, {SweepUnit("ff2"): Level.parse("bfp4")}, name="x", num_layers=2)
    resolved = made.resolve(2, "Llama3-8B")
    assert resolved.format("ff2", layer=1) == "bfp4"
    assert resolved.fidelity("li_ff2", "decode", layer=1) == "lofi"
    assert resolved.fidelity("li_ff1_3", "decode", layer=1) == "hifi2fp16"


def test_a_base_with_a_rule_by_name_is_refused() -> None:
    base = load_precision(
        "precision_cfg = {ff2: bf16}, fidelity_cfg = {li_ff2: hifi4}, "
        "layer_cfg = {*.down_proj: {ff2: bf16, li_ff2: hifi4}}"
    )
    with pytest.raises(ConfigError, match=r"rule for names, '\*.down_proj'; allowed"):
        assign(base, {SweepUnit("ff2"): Level.parse("bfp4")}, name="x", num_layers=2)


def test_a_configuration_says_what_it_is() -> None:
    base = load_precision("bf16")
    choice = {SweepUnit("ff2", 1): Level.parse("bfp8"), SweepUnit("lm_head"): Level.parse("q40")}
    made = assign(base, choice, name="mine", num_layers=2)
    assert (made.name, made.inherits) == ("mine", "bf16")
    assert made.description == "bf16, with 1.ff2 bfp8:hifi2, lm_head q40:lofi"
    many = {SweepUnit("ff2", layer): Level.parse("bfp8") for layer in range(40)}
    long: PrecisionConfig = assign(base, many, name="mine", num_layers=40)
    assert long.description == "bf16, changed"


def test_a_layer_that_is_not_there_is_refused() -> None:
    made = assign(load_precision("bf16"), {SweepUnit("ff2", 2): LEVELS[0]}, name="x", num_layers=2)
    with pytest.raises(ConfigError, match="allowed: 0 to 1"):
        made.resolve(2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp32", "fp32:hifi4"),
        ("bf16", "bf16:hifi4"),
        ("fp16", "fp16:hifi4"),
        ("bfp8", "bfp8:hifi2"),
        ("q80", "q80:hifi2"),
        ("bfp4", "bfp4:lofi"),
        ("q40", "q40:lofi"),
        ("bfp2", "bfp2:lofi"),
        (" BFP8 ", "bfp8:hifi2"),
        ("bfp8:lofi", "bfp8:lofi"),
        ("bfp4:HiFi4", "bfp4:hifi4"),
    ],
)
def test_a_format_alone_has_its_usual_fidelity(text: str, expected: str) -> None:
    assert str(Level.parse(text)) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "unknown format; allowed: fp32, bf16"),
        ("bfp3", "unknown format; allowed: fp32, bf16"),
        ("bfp8:", "unknown fidelity; allowed: lofi, hifi2"),
        ("bfp8:hifi5", "unknown fidelity; allowed: lofi, hifi2"),
        ("bfp8:hifi2:lofi", "unknown fidelity; allowed: lofi, hifi2"),
        ("mixed", "unknown format"),
    ],
)
def test_what_is_no_level_is_refused_with_what_is(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Level.parse(text)
    assert complaint in str(caught.value) and repr(text) in str(caught.value)


@given(st.text(max_size=60) | st.sampled_from(["bfp8:\n", "bfp8\x1b[31m", "x" * 10_000]))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    said = ""
    try:
        assert Level.parse(text) in LEVELS
    except ConfigError as error:
        said = str(error)
    assert said.isprintable() and len(said) < 400


@given(st.sampled_from(LEVELS))
def test_a_level_reads_back(level: Level) -> None:
    assert Level.parse(str(level)) == level


def test_what_a_group_may_have() -> None:
    assert not Level.parse("q40").is_for("kv_cache")
    assert not Level.parse("bfp2").is_for("embedding")
    assert not Level.parse("bfp8").is_for("router")
    assert all(level.is_for(group) for level in LEVELS for group in PRODUCT_GROUPS)


def test_settings_of_a_group() -> None:
    assert Level.parse("bfp8").settings("wo") == {
        "precision": {"wo": "bfp8"},
        "fidelity": {"li_o_decode": "hifi2", "li_o_prefill": "hifi2"},
    }
    assert Level.parse("bfp8").settings("kv_cache") == {
        "precision": {"kv_cache": "bfp8"},
        "fidelity": {},
    }
