"""Who wins where one setting has two spellings: phases of the MLP, experts, layers and names."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from tilewright.compiler.precision import PHASES, ResolvedPrecision, parse_heading

NUM_LAYERS = 4


def resolved(*sections: str) -> ResolvedPrecision:
    return parse_heading(", ".join(sections)).resolve(NUM_LAYERS)


def by_phase(precision: ResolvedPrecision, layer: int, fqn: str | None = None) -> tuple[str, str]:
    """Of gate and up: prefill, decode."""
    prefill, decode = (
        precision.fidelity("li_ff1_3", phase, layer=layer, fqn=fqn) for phase in PHASES
    )
    return prefill, decode


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_a_refinement_beats_the_whole_in_one_map_in_any_order(order: tuple[int, ...]) -> None:
    pairs = ("li_ff1_3: lofi", "li_ff1_3_prefill: hifi4")
    precision = resolved("fidelity_cfg = {" + ", ".join(pairs[n] for n in order) + "}")
    assert by_phase(precision, 0) == ("hifi4", "lofi")


def test_refinements_of_both_phases_are_the_whole() -> None:
    apart = resolved("fidelity_cfg = {li_ff1_3_prefill: lofi, li_ff1_3_decode: lofi}")
    whole = resolved("fidelity_cfg = {li_ff1_3: lofi}")
    assert apart.id == whole.id
    assert apart.heading() == whole.heading()


def test_a_refinement_leaves_the_other_phase_and_group_alone() -> None:
    base = resolved("fidelity_cfg = {}")
    precision = resolved("fidelity_cfg = {li_ff1_3_decode: hifi4}")
    assert by_phase(precision, 1) == ("hifi2", "hifi4")
    for group, phase in product(("li_ff2", "li_qkv", "li_o", "sdpa", "li_lm_head"), PHASES):
        of_base = base.fidelity(group, phase, layer=1)
        assert precision.fidelity(group, phase, layer=1) == of_base


def test_a_layer_sets_one_phase_or_both() -> None:
    precision = resolved(
        "fidelity_cfg = {li_ff1_3_prefill: hifi4}",
        "layer_cfg = {0: {li_ff1_3: lofi}, 1: {li_ff1_3_decode: lofi}, 2: {li_ff1_3: lofi},"
        " 2-3: {li_ff1_3_prefill: hifi3}, *.3.mlp.*: {li_ff1_3: hifi2na}}",
    )
    found = [by_phase(precision, layer) for layer in range(NUM_LAYERS)]
    assert found == [("lofi", "lofi"), ("hifi4", "lofi"), ("hifi3", "lofi"), ("hifi3", "hifi2")]
    assert by_phase(precision, 3, "layers.3.mlp.gate_proj") == ("hifi2na", "hifi2na")
    assert parse_heading(precision.heading()).resolve(NUM_LAYERS).id == precision.id


def test_an_op_group_with_its_phase_is_the_same_as_without() -> None:
    precision = resolved("fidelity_cfg = {li_qkv_prefill: hifi3, li_ff2_decode: lofi}")
    assert precision.fidelity("li_qkv", "prefill", layer=0) == "hifi3"
    assert precision.fidelity("li_qkv_prefill", "prefill", layer=0) == "hifi3"
    assert precision.fidelity("li_qkv_decode", "decode", layer=0) == "hifi2"
    assert precision.fidelity("li_ff2_decode", "decode", layer=0) == "lofi"


@pytest.mark.parametrize("order", list(permutations(range(2))))
def test_experts_set_by_name_keep_their_format(order: tuple[int, ...]) -> None:
    """A pattern of the dense group moves only experts that nobody set, as with layers."""
    pairs = ("*.experts.*: {experts_ff1_3: bfp4}", "*.mlp.*: {ff1_3: bf16}")
    precision = resolved("layer_cfg = {" + ", ".join(pairs[n] for n in order) + "}")
    fqn = "layers.0.mlp.experts.7"
    assert precision.format("experts_ff1_3", layer=0, fqn=fqn) == "bfp4"
    assert precision.format("ff1_3", layer=0, fqn=fqn) == "bf16"
    assert precision.format("experts_ff1_3", layer=0, fqn="layers.0.mlp.up") == "bf16"


def test_experts_set_by_layer_keep_their_format() -> None:
    precision = resolved(
        "precision_cfg = {ff2: bfp4}",
        "layer_cfg = {0: {experts_ff2: bf16}, 0-1: {ff2: bfp2}}",
    )
    found = [precision.format("experts_ff2", layer=layer) for layer in range(NUM_LAYERS)]
    assert found == ["bf16", "bfp2", "bfp4", "bfp4"]


def test_an_override_changes_what_it_names_and_nothing_else() -> None:
    base = resolved("precision_cfg = {}")
    for selector, layers in (("2", (2,)), ("1-2", (1, 2)), ("*.2.wo", ())):
        precision = resolved(f"layer_cfg = {{{selector}: {{wo: bf16}}}}")
        for layer, group in product(range(NUM_LAYERS), ("ff1_3", "ff2", "wqkv", "wo", "kv_cache")):
            named = group == "wo" and layer in layers
            expected = "bf16" if named else base.format(group, layer=layer)
            assert precision.format(group, layer=layer) == expected
            by_name = precision.format(group, layer=layer, fqn=f"layers.{layer}.{group}")
            is_matched = selector == "*.2.wo" and (layer, group) == (2, "wo")
            assert by_name == ("bf16" if is_matched else expected)
        assert precision.id != base.id
