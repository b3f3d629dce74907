"""A found configuration as a file: it means what was measured, and says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.precision import OP_GROUP_OF, PHASES, PrecisionConfig, load_precision
from tilewright.evaluate.search.found_yaml import render, usual_levels
from tilewright.evaluate.search.levels import PRODUCT_GROUPS, Level, SweepUnit, assign

NUM_LAYERS = 3
PARTS = [
    *(SweepUnit(g, layer) for g in PRODUCT_GROUPS if g != "lm_head" for layer in range(NUM_LAYERS)),
    SweepUnit("lm_head"),
]
LEVELS = [Level.parse(text) for text in ("bfp8", "bfp4", "q40", "bfp8:lofi", "fp16:hifi3")]
BASES = ("bf16", "base", "all-bfp4", "mlp-bf16-bfp4", "performance")
BF16 = load_precision("bf16")

DENSE = [part for part in PARTS if part.group in ("ff1_3", "ff2", "wqkv", "wo", "lm_head")]
HYBRID = [
    *(SweepUnit(g, layer) for g in ("delta_in", "delta_out") for layer in (0, 1)),
    *(SweepUnit(g, 2) for g in ("wqkv", "wo")),
    *(SweepUnit(g, layer) for g in ("experts_ff1_3", "shared_ff1_3", "ff2") for layer in (0, 1, 2)),
    SweepUnit("lm_head"),
]

choices, dense_choices, hybrid_choices = (
    st.fixed_dictionaries({part: st.none() | st.sampled_from(LEVELS) for part in parts})
    for parts in (PARTS, DENSE, HYBRID)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That examples write over one another in."""
    return tmp_path_factory.mktemp("found")


def rendered(levels: Mapping[SweepUnit, Level | None], base: PrecisionConfig = BF16) -> str:
    return render(
        base,
        levels,
        description="found by a search for top-1 >= 95 % on cpu",
        provenance=["Found by a test: Tiny (hash) on cpu,", "top-1 99 % \u2265 95 %."],
        reason=lambda part: f"why {part} has its level: bfp8:hifi2 costs KL 1e-3",
        group_reason=lambda group: f"what {group} comes to: KL 1e-3",
    )


def read_back(text: str, folder: Path) -> PrecisionConfig:
    path = folder / "found.yaml"
    path.write_text(text, encoding="utf-8")
    return load_precision(str(path))


@given(levels=choices | dense_choices | hybrid_choices, base_name=st.sampled_from(BASES))
def test_the_file_means_what_was_measured(
    levels: dict[SweepUnit, Level | None], base_name: str, folder: Path
) -> None:
    base = load_precision(base_name)
    lowered = {part: level for part, level in levels.items() if level is not None}
    places: dict[str, list[int]] = {part.group: [] for part in levels}
    for part in levels:
        places[part.group] += [] if part.layer is None else [part.layer]
    measured = assign(base, lowered, name="measured", num_layers=NUM_LAYERS, groups=places)
    text = rendered(levels, base)
    found = read_back(text, folder)
    told, meant = found.resolve(NUM_LAYERS), measured.resolve(NUM_LAYERS)
    for part in levels:
        assert told.format(part.group, layer=part.layer) == meant.format(
            part.group, layer=part.layer
        ), part
        for phase in PHASES:
            family = OP_GROUP_OF[part.group]
            both = (each.fidelity(family, phase, layer=part.layer) for each in (told, meant))
            assert len(set(both)) == 1, (part, phase)
    if not any(part.group.startswith("delta") for part in levels):  # all layers have all groups
        assert (told.id, told.heading()) == (meant.id, meant.heading())
    assert found.inherits == base_name
    assert found.description == "found by a search for top-1 >= 95 % on cpu"


@given(choices)
def test_every_exception_has_its_reason_and_no_map_is_empty(
    levels: dict[SweepUnit, Level | None],
) -> None:
    lines = rendered(levels).splitlines()
    usual = usual_levels(levels)
    exceptions = [p for p, level in levels.items() if level != usual[p.group]]
    for part in PARTS:
        reasons = [line for line in lines if f"why {part} has its level" in line]
        assert len(reasons) == (part in exceptions)
    for group, level in usual.items():
        assert any(f"what {group} comes to" in line for line in lines) is (level is not None)
    lines = [line for line in lines if not line.lstrip().startswith("#")]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        indent = len(line) - len(line.lstrip())
        if line.endswith(":"):
            assert len(after) - len(after.lstrip()) > indent, f"nothing in {line!r}"


def test_the_file_by_hand() -> None:
    bfp8, bfp4 = Level.parse("bfp8"), Level.parse("bfp4")
    levels: dict[SweepUnit, Level | None] = dict.fromkeys(DENSE, bfp8)
    levels |= dict.fromkeys([part for part in DENSE if part.group in ("wo", "lm_head")])
    levels |= {SweepUnit("wo", 2): bfp4, SweepUnit("ff2", 0): None, SweepUnit("wqkv", 2): bfp4}
    assert rendered(levels) == (
        "# Found by a test: Tiny (hash) on cpu,\n"
        "# top-1 99 % \u2265 95 %.\n"
        "inherits: bf16\n"
        'description: "found by a search for top-1 >= 95 % on cpu"\n'
        "precision:\n"
        "  # what ff1_3 comes to: KL 1e-3\n"
        "  ff1_3: bfp8\n"
        "  # what ff2 comes to: KL 1e-3\n"
        "  ff2: bfp8\n"
        "  # what wqkv comes to: KL 1e-3\n"
        "  wqkv: bfp8\n"
        "fidelity:\n"
        "  li_ff1_3: hifi2\n"
        "  li_ff2: hifi2\n"
        "  li_qkv_decode: hifi2\n"
        "  li_qkv_prefill: hifi2\n"
        "layers:\n"
        "  0:\n"
        "    # ff2: why 0.ff2 has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    ff2: bf16\n"
        "    li_ff2: hifi4\n"
        "  2:\n"
        "    # wqkv: why 2.wqkv has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    wqkv: bfp4\n"
        "    # wo: why 2.wo has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    wo: bfp4\n"
        "    li_o_decode: lofi\n"
        "    li_o_prefill: lofi\n"
        "    li_qkv_decode: lofi\n"
        "    li_qkv_prefill: lofi\n"
    )


def test_the_file_of_a_mixture_of_experts_by_hand() -> None:
    """What follows is named, and what is shared has the highest fidelity that is asked for."""
    bfp8, bfp4 = Level.parse("bfp8"), Level.parse("bfp4")
    groups = ("ff1_3", "experts_ff1_3")
    levels: dict[SweepUnit, Level | None] = {
        SweepUnit(g, layer): bfp8 for g in groups for layer in range(3)
    }
    levels |= {SweepUnit("experts_ff1_3", layer): None for layer in (1, 2)}
    levels |= {SweepUnit("delta_out", layer): bfp4 for layer in (0, 1)}
    text = rendered(levels)
    assert text[text.index("precision:") :] == (
        "precision:\n"
        "  # what ff1_3 comes to: KL 1e-3\n"
        "  ff1_3: bfp8\n"
        "  # not lowered with ff1_3\n"
        "  experts_ff1_3: bf16\n"
        "fidelity:\n"
        "  li_o_decode: lofi\n"
        "  li_o_prefill: lofi\n"
        "layers:\n"
        "  0:\n"
        "    # experts_ff1_3: why 0.experts_ff1_3 has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    experts_ff1_3: bfp8\n"
        "    # delta_out: why 0.delta_out has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    delta_out: bfp4\n"
        "    li_ff1_3: hifi2\n"
        "  1:\n"
        "    # delta_out: why 1.delta_out has its level: bfp8:hifi2 costs KL 1e-3\n"
        "    delta_out: bfp4\n"
        "  2:\n"
        "    li_o_decode: hifi4\n"
        "    li_o_prefill: hifi4\n"
    )


def test_a_search_that_lowers_nothing_is_its_base(tmp_path: Path) -> None:
    text = rendered(dict.fromkeys(PARTS))
    assert not any(key in text for key in ("precision:", "fidelity:", "layers:"))
    assert read_back(text, tmp_path).resolve(NUM_LAYERS).id == BF16.resolve(NUM_LAYERS).id


def test_exceptions_alone_have_no_global_maps(tmp_path: Path) -> None:
    levels = {**dict.fromkeys(DENSE), SweepUnit("wqkv", 1): LEVELS[0]}
    text = rendered(levels)
    assert "layers:" in text and "precision:" not in text and "fidelity:" not in text
    found = read_back(text, tmp_path).resolve(NUM_LAYERS)
    assert [found.format("wqkv", layer=layer) for layer in range(3)] == ["bf16", "bfp8", "bf16"]


def test_the_head_alone(tmp_path: Path) -> None:
    text = rendered({**dict.fromkeys(PARTS), SweepUnit("lm_head"): LEVELS[1]})
    assert "layers:" not in text
    found = read_back(text, tmp_path).resolve(NUM_LAYERS)
    assert (found.format("lm_head"), found.fidelity("li_lm_head", "decode")) == ("bfp4", "lofi")


def test_the_usual_level_is_the_most_common_one() -> None:
    a, b = LEVELS[:2]
    levels = {
        **{SweepUnit("ff2", layer): level for layer, level in enumerate((a, b, b))},
        **{SweepUnit("wo", layer): level for layer, level in enumerate((None, None, a))},
        SweepUnit("lm_head"): a,
    }
    assert usual_levels(levels) == {"ff2": b, "wo": None, "lm_head": a}
    assert usual_levels({}) == {}
