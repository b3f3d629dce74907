"""Plans as cells in their order, and what a model's weights come to; tiny models, nothing runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from tests.targets.test_weight_storage import ask_for
from tests.tiny import GOLDENS, compiled, precision_of, tiny_model
from tilewright.compiler.devices import DEVICES
from tilewright.compiler.precision import (
    OP_GROUP_OF,
    PHASES,
    PrecisionConfig,
    load_precision,
    parse_heading,
)
from tilewright.errors import CompileError, ConfigError
from tilewright.evaluate.search.levels import PRODUCT_GROUPS, Level, SweepUnit, rank
from tilewright.evaluate.sweep import plans
from tilewright.evaluate.sweep.model import SweptModel, step_bytes, swept_model
from tilewright.evaluate.sweep.plans import (
    ACCURACY_CASE,
    BATCH_CASE,
    SPEED_CASE,
    Measures,
    SweepConfig,
)
from tilewright.evaluate.sweep.trial import Trial
from tilewright.models import load_model

BASE = load_precision("bf16")
LEVEL = Level.parse("bfp8")
UNTIED = {"tie_embeddings": False}


def swept(**changes: Any) -> SweptModel:
    """A tiny model with room for the speed and accuracy cases."""
    loaded = tiny_model(**{"max_positions": 2048, **changes})
    loaded.checkpoint.content_hash = lambda: f"hash of {loaded.name}"
    return swept_model(loaded, f"path/to/{loaded.name}")


def named(name: str, weights: str, **changes: str) -> PrecisionConfig:
    return replace(precision_of(weights, **changes), name=name)


def grid(*precisions: PrecisionConfig, models: tuple[SweptModel, ...] = ()) -> list[SweepConfig]:
    return plans.entries(models or (swept(),), ["cpu"], [], precisions)


def order(cells: list[Trial]) -> list[tuple[str, str, int]]:
    return [(each.precision, each.case, each.round) for each in cells]


def test_a_model_is_seen_by_groups_and_layers() -> None:
    model = swept(**UNTIED, num_layers=3)
    assert (model.argument, model.name) == ("path/to/tiny", "tiny")
    assert (model.content_hash, model.num_layers) == ("hash of tiny", 3)
    assert model.groups() == ["embedding", "wqkv", "wo", "ff1_3", "ff2", "lm_head"]
    assert [model.layers(group) for group in model.groups()] == [
        [],
        *([[0, 1, 2]] * 4),
        [],
    ]
    per_layer = Counter(weight.group for weight in model.weights if weight.layer == 1)
    assert per_layer == {"wqkv": 3, "wo": 1, "ff1_3": 2, "ff2": 1}
    (down,) = (w for w in model.weights if (w.group, w.layer) == ("ff2", 2))
    assert (down.fqn, down.shape) == ("model.layers.2.mlp.down_proj", (32, 48))


@pytest.mark.parametrize("changes", [{}, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("compute", ["fast", "exact"])
def test_held_bytes_are_what_the_compiled_model_holds(
    changes: dict[str, Any], compute: str
) -> None:
    """Without biases and norms: a tiny model's norms are held too."""
    precision = precision_of(
        "bfp8", "hifi2", ff2="q40", lm_head="bf16", layers="1: {ff1_3: bfp4, li_ff1_3: hifi4}"
    )
    model = swept(**changes)
    held = model.stored_bytes(model.resolve(precision), "cpu", compute)
    executable = compiled(tiny_model(**changes), "cpu", precision=precision, compute=compute)
    whole = executable.memory().weights
    executable.close()
    norms = 4 * 32 * (2 * model.num_layers + 1)
    assert sum(held.values()) == whole - norms


def test_held_bytes_add_up_from_the_target_s_own() -> None:
    model = swept(**UNTIED)
    held = model.stored_bytes(model.resolve(precision_of("bfp8", "hifi2")), "cpu")

    def bytes_of(shape: tuple[int, int], group: str) -> int:
        phases = ("hifi2", "hifi2")
        return ask_for("cpu", shape, "bfp8", group=group, fidelities=phases).num_bytes

    assert held["ff2", 0, "bfp8 blocks"] == bytes_of((32, 48), "ff2")
    assert held["ff1_3", 1, "bfp8 blocks"] == 2 * bytes_of((48, 32), "ff1_3")
    query, key = bytes_of((64, 32), "wqkv"), bytes_of((32, 32), "wqkv")
    assert held["wqkv", 1, "bfp8 blocks"] == query + 2 * key
    assert held["lm_head", None, "bfp8 blocks"] == bytes_of((61, 32), "lm_head")
    assert held["embedding", None, "float32"] == 61 * 32 * 4  # looked up: never in blocks
    assert len(held) == 2 + 2 * 4


def test_a_layer_of_its_own_is_held_in_its_own_kind() -> None:
    model = swept()
    mixed = precision_of("bf16", "hifi2", layers="1: {ff2: q40}, 0: {wo: bfp8}")
    held = model.stored_bytes(model.resolve(mixed), "cpu")
    kinds = {(group, layer): kind for group, layer, kind in held}
    assert kinds["ff2", 1] == "q40 blocks" and kinds["wo", 0] == "bfp8 blocks"
    assert kinds["ff2", 0] == kinds["wo", 1] == "float32"


def test_a_step_reads_all_but_the_embedding() -> None:
    held = {
        ("embedding", None, "float32"): 1000,
        ("ff2", 0, "float32"): 7,
        ("ff2", 1, "blocks"): 11,
        ("wo", 1, "blocks"): 13,
        ("lm_head", None, "float32"): 17,
    }
    assert step_bytes(held) == {"float32": 24, "blocks": 24}
    assert sum(held.values()) == 1048
    assert step_bytes({}) == {}


def test_a_step_reads_a_share_of_the_experts_and_of_nothing_else() -> None:
    held: dict[tuple[str, int | None, str], int] = {
        ("experts_ff1_3", 0, "float32"): 80,
        ("experts_ff2", 0, "float32"): 40,
        ("experts_bias", 0, "float32"): 3,  # no name says by itself that a token reads a part
        ("shared_ff2", 0, "float32"): 5,
    }
    assert step_bytes(held, 0.25) == {"float32": 20 + 10 + 3 + 5}


def test_accuracy_comes_first_then_speed_in_rounds() -> None:
    entries = grid(BASE, named("b", "bfp8"), named("c", "bfp4"))
    measures = Measures(cases=(SPEED_CASE, BATCH_CASE, ACCURACY_CASE), rounds=2)
    found = plans.cells(entries, measures)
    names = ("bf16", "b", "c")
    assert order(found) == [
        *((name, ACCURACY_CASE, 0) for name in names),
        *(
            (name, case, number)
            for number in (0, 1)
            for case in (SPEED_CASE, BATCH_CASE)
            for name in names
        ),
    ]
    assert [cell.kind for cell in found] == ["accuracy"] * 3 + ["speed"] * 12
    assert len({cell.id for cell in found}) == len(found) == measures.count(3)


def test_rounds_are_added_after_those_there_are() -> None:
    entries = grid(BASE)
    first = plans.cells(entries, Measures(rounds=2))
    later = plans.cells(entries, Measures(rounds=3, first_round=2))
    assert [cell.round for cell in later if cell.kind == "speed"] == [2, 3, 4]
    shared = {cell.id for cell in first} & {cell.id for cell in later}
    assert shared == {cell.id for cell in first if cell.kind == "accuracy"}


def test_every_model_and_target_has_its_cells() -> None:
    small, large = swept(), swept(name="large", num_layers=3)
    entries = plans.entries([small, large], ["cpu", "reference"], [], [BASE, named("b", "bfp8")])
    found = plans.cells(entries, Measures(cases=(ACCURACY_CASE,)))
    assert [(cell.model_name, cell.target, cell.precision) for cell in found] == [
        (name, target, precision)
        for name in ("tiny", "large")
        for target in ("cpu", "reference")
        for precision in ("bf16", "b")
    ]
    assert {cell.model for cell in found} == {"path/to/tiny", "path/to/large"}
    assert {cell.model_hash for cell in found} == {"hash of tiny", "hash of large"}


def test_a_cell_says_all_that_a_run_needs() -> None:
    model = swept()
    precision = named("mine", "bfp8", ff2="bfp4")
    measures = Measures(rounds=1, compute="exact", threads=3, text="held-out")
    accuracy, speed = plans.cells(grid(precision, models=(model,)), measures)
    assert (accuracy.text, speed.text) == ("held-out", None)
    for cell in (accuracy, speed):
        assert (cell.compute, cell.threads, cell.device) == ("exact", 3, "CPU")
        read = parse_heading(cell.heading).resolve(model.num_layers, model.name)
        assert read.id == cell.precision_id == model.resolve(precision).id
        held = model.stored_bytes(model.resolve(precision), "cpu", "exact")
        assert cell.weight_bytes == sum(held.values()) and cell.step_bytes == step_bytes(held)


def test_equal_configurations_are_measured_once() -> None:
    one, other = named("one", "bfp8"), named("other", "bfp8")
    measures = Measures(rounds=2)
    found = plans.cells(grid(BASE, one, other), measures)
    assert len(found) == measures.count(2)
    assert len({cell.id for cell in found}) == len(found)


def test_of_equal_configurations_the_first_one_is_named() -> None:
    """The base stands first: it stays the base where a part is at the level already."""
    base = replace(precision_of("bfp8", "hifi2"), name="base of this")
    found = plans.sensitivity_entries(swept(), "cpu", "CPU", base=base, level=LEVEL)
    cells = plans.cells(found, Measures(rounds=1))
    shown = {(cell.precision, cell.part) for cell in cells}
    assert shown == {("base of this", ""), ("activation=bfp8:hifi2", "activation")}


def test_what_does_not_fit_is_refused_before_anything_runs() -> None:
    entries = grid(BASE, models=(swept(max_positions=256),))
    with pytest.raises(ConfigError, match=r"'performance-ci-1' needs a context of 328 .* 256"):
        plans.cells(entries, Measures())
    roomy = grid(BASE, models=(swept(max_positions=1023),))
    assert plans.cells(roomy, Measures(cases=(SPEED_CASE,)))
    with pytest.raises(ConfigError, match="'performance-top-1' needs a context of 1024"):
        plans.cells(roomy, Measures())
    with pytest.raises(ConfigError, match="'performance-dp-4' needs 4 replicas"):
        plans.cells(grid(BASE), Measures(cases=("performance-dp-4",)))
    with pytest.raises(ConfigError, match="unknown case 'performance-ci-2'"):
        plans.cells(grid(BASE), Measures(cases=("performance-ci-2",)))
    with pytest.raises(ConfigError, match="allowed: 0 to 1"):
        plans.cells(grid(BASE, precision_of(layers="2: {ff2: bfp8}")), Measures())
    with pytest.raises(CompileError, match="hifi4 in prefill and hifi2 in decode"):
        plans.cells(grid(named("x", "bfp8", li_ff2="hifi2", li_ff2_prefill="hifi4")), Measures())


def test_one_model_of_several_that_does_not_fit_is_enough() -> None:
    with pytest.raises(ConfigError, match="allowed by this model: 64"):
        plans.cells(grid(BASE, models=(swept(), swept(max_positions=64))), Measures())


def test_devices_of_a_target() -> None:
    assert plans.devices_of("cpu") == plans.devices_of("reference") == ("CPU",)
    for target in {device.target for device in DEVICES.values()}:
        here = [device.name for device in DEVICES.values() if device.target == target]
        assert list(plans.devices_of(target)) == here


def test_an_unknown_device_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        plans.entries([swept()], ["cpu", "reference"], ["CPU", "TPU\n"], [BASE])
    assert str(caught.value).startswith("device 'TPU\\n': no target here runs on it; allowed: CPU")
    assert len(plans.entries([swept()], ["cpu", "reference"], ["CPU"], [BASE])) == 2
    assert plans.entries([], ["cpu"], [], [BASE]) == []


def test_the_published_settings_are_the_published_headings() -> None:
    published = (GOLDENS / "seed_headings.txt").read_text().splitlines()
    ours = [load_precision(name).resolve(32) for name in plans.PUBLISHED]
    assert {each.heading() for each in ours} == set(published)
    assert len({each.id for each in ours}) == len(ours) == len(published) == 12
    assert plans.NAMED["pareto"] == plans.PUBLISHED
    assert {"performance", "accuracy"} <= set(plans.NAMED["table"])


@pytest.mark.parametrize(
    ("level", "without"),
    [("bfp8", set()), ("q40", {"kv_cache", "activation"}), ("bfp2:lofi", {"embedding"})],
)
@pytest.mark.parametrize("changes", [{}, {**UNTIED, "num_layers": 3}], ids=["tied", "untied"])
def test_a_sensitivity_plan_lowers_every_part_once(
    level: str, without: set[str], changes: dict[str, Any]
) -> None:
    model = swept(**changes)
    found = plans.sensitivity_entries(model, "cpu", "CPU", base=BASE, level=Level.parse(level))
    without = without | ({"kv_cache", "activation"} if level.startswith("bfp2") else set())
    groups = {*model.groups(), "kv_cache", "activation"} - without
    in_layers = [group for group in model.groups() if model.layers(group)]
    assert set(in_layers) == {"ff1_3", "ff2", "wqkv", "wo"} < set(PRODUCT_GROUPS)
    assert len(found) == 1 + len(groups) + 1 + model.num_layers * len(in_layers)
    assert found[0].precision is BASE and found[0].part == ""
    parts = [entry.part for entry in found[1:]]
    assert set(parts) == {
        *groups,
        plans.ALL,
        *(f"{layer}.{group}" for group in in_layers for layer in range(model.num_layers)),
    }
    assert len(set(parts)) == len(parts)
    assert all(entry.is_timed is ("." not in entry.part) for entry in found)
    assert len({model.resolve(entry.precision).id for entry in found}) == len(found)


def test_each_entry_lowers_its_part_and_nothing_else() -> None:
    model = swept()
    for entry in plans.sensitivity_entries(model, "cpu", "CPU", base=BASE, level=LEVEL):
        resolved = model.resolve(entry.precision)
        lowered = {
            str(SweepUnit(group, layer))
            for group in ("wqkv", "wo", "ff1_3", "ff2", "kv_cache", "activation")
            for layer in range(model.num_layers)
            if resolved.format(group, layer=layer) == "bfp8"
        } | {group for group in ("embedding", "lm_head") if resolved.format(group) == "bfp8"}
        if entry.part == plans.ALL:  # every product, and neither tables nor activations
            groups = [group for group in model.groups() if group != "embedding"]
        else:
            groups = [entry.part] if entry.part else []
        outside = ("embedding", "lm_head")
        expected = {
            f"{layer}.{group}"
            for group in groups
            if "." not in group and group not in outside
            for layer in range(model.num_layers)
        } | {group for group in groups if "." in group or group in outside}
        assert lowered == expected, entry.part
        if entry.part:
            assert entry.precision.name == f"{entry.part}=bfp8:hifi2"


def test_single_layers_are_neither_timed_nor_kept() -> None:
    """A compiled program in the cache for every layer of every group would fill the disk."""
    found = plans.sensitivity_entries(swept(), "cpu", "CPU", base=BASE, level=LEVEL)
    cells = plans.cells(found, Measures(rounds=2))
    layers = [cell for cell in cells if "." in cell.part]
    assert layers and {cell.kind for cell in layers} == {"accuracy"}
    assert not any(cell.is_kept for cell in layers)
    others = [cell for cell in cells if "." not in cell.part]
    assert all(cell.is_kept for cell in others)
    timed = Counter(cell.part for cell in others if cell.kind == "speed")
    assert set(timed.values()) == {2} and set(timed) == {cell.part for cell in others}
    assert cells[0].precision == "bf16"


@pytest.mark.parametrize("level", ["bfp8", "bf16:lofi"])
def test_each_entry_of_a_hybrid_mixture_lowers_its_part_alone(level: str) -> None:
    """Neither what follows a group, nor the arithmetic of what shares products' fidelity."""
    model = swept_model(load_model("shape:tiny-hybrid"), "shape:tiny-hybrid")
    groups = model.groups()
    assert {"wqkv", "delta_in", "delta_gates", "experts_ff1_3", "shared_ff1_3"} <= set(groups)
    base = replace(precision_of("fp32", "hifi4", router="fp32"), name="base of this")
    wanted = Level.parse(level)
    before = model.resolve(base)
    for entry in plans.sensitivity_entries(model, "cpu", "CPU", base=base, level=wanted):
        after = model.resolve(entry.precision)
        for weight in model.weights:
            here = {weight.group, f"{weight.layer}.{weight.group}", plans.ALL}
            usual = before.format(weight.group, layer=weight.layer)
            found = after.format(weight.group, layer=weight.layer)
            if entry.part in here and wanted.is_for(weight.group) and weight.group != "embedding":
                assert found == wanted.format, (entry.part, weight)
            elif weight.group != "embedding":
                assert found == usual, (entry.part, weight)
            if weight.group not in OP_GROUP_OF or entry.part in here:
                continue
            family = OP_GROUP_OF[weight.group]
            for phase in PHASES:
                least = before.fidelity(family, phase, layer=weight.layer)
                assert rank(after.fidelity(family, phase, layer=weight.layer)) >= rank(least)


def test_sensitivities_of_the_cache_are_listed_layer_by_layer_on_demand() -> None:
    by_layer = {"cache_layers": True, "calibration": "gptq"}
    found = plans.sensitivity_entries(swept(), "cpu", "CPU", base=BASE, level=LEVEL, **by_layer)  # type: ignore[arg-type]
    cache = [entry for entry in found if entry.part.endswith("kv_cache")]
    assert [entry.part for entry in cache] == ["kv_cache", "0.kv_cache", "1.kv_cache"]
    one = cache[-1].precision.resolve(2)
    assert [one.format("kv_cache", layer=layer) for layer in (0, 1)] == ["bf16", "bfp8"]
    assert not any(cell.calibration for cell in plans.cells(found, Measures())), "8 bits: exact"
    board = plans.sensitivity_entries(swept(), "n150", "N150", base=BASE, level=LEVEL, **by_layer)  # type: ignore[arg-type]
    (only,) = [entry for entry in board if entry.part == "1.v_cache"]
    state = only.precision.resolve(2)
    formats = [state.format(group, layer=1) for group in ("kv_cache", "v_cache")]
    assert formats == ["bf16", "bfp8"] and state.format("v_cache", layer=0) == "bf16"
    low = plans.sensitivity_entries(
        swept(), "cpu", "CPU", base=BASE, level=Level.parse("bfp4"), calibration="gptq"
    )
    calibrated = {cell.part for cell in plans.cells(low, Measures()) if cell.calibration}
    assert {"ff2", "0.ff2", "all"} <= calibrated and not calibrated & {"", "kv_cache"}
