"""Every rule for layers reaches something of the model, or is refused; and only that counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from tilewright.compiler.precision import (
    GroupedModule,
    ResolvedPrecision,
    load_precision,
    parse_heading,
)
from tilewright.errors import ConfigError

_ATTENTION = {"self_attn": "kv_cache", "self_attn.q_proj": "wqkv", "self_attn.o_proj": "wo"}
_DELTA = {"linear_attn.in_proj": "delta_in", "linear_attn.out_proj": "delta_out"}
_DENSE = {"mlp.gate_proj": "ff1_3", "mlp.up_proj": "ff1_3", "mlp.down_proj": "ff2"}
_EXPERTS = {
    "mlp.gate": "router",
    "mlp.experts.up_proj": "experts_ff1_3",
    "mlp.experts.down_proj": "experts_ff2",
}
_AROUND = GroupedModule("embed", "embedding", None), GroupedModule("lm_head", "lm_head", None)


def model(*layers: dict[str, str]) -> tuple[GroupedModule, ...]:
    return (
        _AROUND[0],
        *(
            GroupedModule(f"layers.{index}.{name}", group, index)
            for index, layer in enumerate(layers)
            for name, group in layer.items()
        ),
        _AROUND[1],
    )


LLAMA = model(*[_ATTENTION | _DENSE] * 4)
SPARSE = model(*[_ATTENTION | _EXPERTS] * 4)
HYBRID = model(*[_DELTA | _DENSE] * 3, _ATTENTION | _DENSE)


def resolve(
    layers: str, modules: Sequence[GroupedModule] = LLAMA, **precision: str
) -> ResolvedPrecision:
    settings = ", ".join(f"{key}: {value}" for key, value in precision.items())
    heading = f"precision_cfg = {{{settings}}}, layer_cfg = {{{layers}}}"
    return parse_heading(heading).resolve(4, modules=modules)


def test_a_rule_for_a_container_holds_for_what_lies_under_it() -> None:
    found = resolve("*.mlp: {ff2: bf16, li_ff2: hifi4}, layers.3: {ff2: fp32, wqkv: bfp4}")
    assert [found.format("ff2", layer=n, fqn=f"layers.{n}.mlp.down_proj") for n in range(4)] == [
        *["bf16"] * 3,
        "fp32",
    ]
    assert found.fidelity("li_ff2", "prefill", layer=1, fqn="layers.1.mlp.down_proj") == "hifi4"
    assert found.format("wqkv", layer=3, fqn="layers.3.self_attn.q_proj") == "bfp4"
    assert found.format("wqkv", layer=2, fqn="layers.2.self_attn.q_proj") == "bfp8"
    assert found.format("ff1_3", layer=0, fqn="layers.0.mlp.up_proj") == "bfp8"


def test_a_name_is_a_container_of_no_longer_name() -> None:
    with pytest.raises(ConfigError, match=r"layers.\*.mlp.down: matches no name of the model"):
        resolve("*.mlp.down: {ff2: bf16}")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("*.mlp.down", "layers.0.mlp.down_proj"),
        ("*.gate_prj", "layers.0.mlp.gate_proj"),
        ("layers.9.self_attn", "layers.3.self_attn"),
        ("xyzzy", "layers.3.mlp.down_proj"),
    ],
)
def test_a_pattern_of_no_name_is_shown_the_closest_that_the_model_has(
    pattern: str, name: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(f"{pattern}: {{ff2: bf16}}")
    assert str(caught.value).endswith(f"patterns of names such as {name}")


@pytest.mark.parametrize(
    ("modules", "layers", "message"),
    [
        (
            LLAMA,
            "*.down_proj: {ff1_3: bf16}",
            "heading: layers.*.down_proj: ff1_3 has no effect on this model's modules there (ff1_3"
            " is of layers.0.mlp.gate_proj, layers.0.mlp.up_proj, layers.1.mlp.gate_proj, ...);"
            " allowed: activation, block_output, ff2, li_ff2",
        ),
        (LLAMA, "lm_head: {ff2: bf16}", "allowed: activation, li_lm_head, lm_head"),
        (LLAMA, "*.mlp: {ff2: bf16, wqkv: bf16}", "layers.*.mlp: wqkv has no effect"),
        (LLAMA, "*.q_proj: {li_ff2: hifi4}", "layers.*.q_proj: li_ff2 has no effect"),
        (LLAMA, "embed: {activation: bf16}", "layers.embed: activation has no effect"),
        (LLAMA, "*.mlp: {experts_ff2: bf16}", "(experts_ff2 is in no module of it)"),
        (LLAMA, "1: {router: fp32}", "layers.1: router has no effect"),
        (LLAMA, "0: {ff2: bf16, router: fp32}", "layers.0: router has no effect"),
        (LLAMA, "0: {ff2: bf16}, 1: {delta_in: bf16}", "layers.1: delta_in has no effect"),
        (HYBRID, "0-2: {kv_cache: bf16}", "(kv_cache is of layers.3.self_attn)"),
        (HYBRID, "0-1: {kv_cache: bf16}, 3: {kv_cache: bf16}", "layers.0-1: kv_cache"),
        (HYBRID, "1: {ff2: bf16, kv_cache: bf16}, 3: {kv_cache: bf16}", "layers.1: kv_cache"),
        (HYBRID, "*.self_attn: {delta_in: bf16}", "layers.*.self_attn: delta_in has no"),
        (SPARSE, "*.mlp: {ff1_3: bf16, experts_ff1_3: bf16}", "layers.*.mlp: ff1_3 has no effect"),
        (SPARSE, "2: {ff1_3: bf16, experts_ff1_3: bf16}", "layers.2: ff1_3 has no effect"),
    ],
)
def test_a_rule_without_an_effect_is_refused(
    modules: Sequence[GroupedModule], layers: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(layers, modules)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    parse_heading(f"layer_cfg = {{{layers}}}").resolve(4)


def test_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text('layers: {"*.down_proj": {ff1_3: bf16}}')
    with pytest.raises(ConfigError, match=r"mine\.yaml: layers\.\*\.down_proj: ff1_3 has no"):
        load_precision(str(path)).resolve(4, modules=LLAMA)


def test_a_group_that_follows_is_reached_by_the_one_it_follows() -> None:
    found = resolve("*.mlp: {ff1_3: bf16}, 1: {ff2: bfp4}", SPARSE)
    assert found.format("experts_ff1_3", layer=0, fqn="layers.0.mlp.experts.up_proj") == "bf16"
    assert found.format("experts_ff2", layer=1, fqn="layers.1.mlp.experts.down_proj") == "bfp4"
    with pytest.raises(ConfigError, match=r"layers\.1: ff2 has no effect"):
        resolve("1: {ff2: bfp4}", SPARSE, experts_ff2="bf16")


def test_a_rule_that_a_later_source_overrides_was_no_mistake() -> None:
    parent = parse_heading("layer_cfg = {1: {ff2: bfp4}}")
    child = parse_heading("precision_cfg = {experts_ff2: bf16}")
    both = dataclasses.replace(child, fragments=(*parent.fragments, child.fragments[-1]))
    found = both.resolve(4, modules=SPARSE)
    assert {found.format("experts_ff2", layer=n) for n in range(4)} == {"bf16"}
    assert found.id == child.resolve(4, modules=SPARSE).id


def test_a_table_of_all_groups_may_name_those_of_other_layers(tmp_path: Path) -> None:
    """Per-decoder files name every group in every entry; only what has an effect is told."""
    path = tmp_path / "decoders.json"
    entry = '{"precision_cfg": {"KV_CACHE": "BF16", "WQKV": "BF16", "FF2": "BFP4"}}'
    path.write_text(f'{{"decoders": {{"0": {entry}, "3": {entry}}}}}')
    found = load_precision(str(path)).resolve(4, modules=HYBRID)
    told = {(row.scope, row.key) for row in found.explain() if row.scope.startswith("layer ")}
    assert ("layer 0", "ff2") in told
    assert ("layer 3", "kv_cache") in told
    assert ("layer 0", "kv_cache") not in told


@pytest.mark.parametrize(
    ("layers", "same"),
    [
        ("0-3: {kv_cache: bf16, ff2: bf16}", "3: {kv_cache: bf16}, 0-3: {ff2: bf16}"),
        ("1-3: {kv_cache: bf16, ff2: bfp4}", "3: {kv_cache: bf16}, 1-3: {ff2: bfp4}"),
        ("0: {wqkv: bfp4}, 2-3: {wqkv: bfp4, delta_out: bf16}", None),
        ("0-2: {ff2: bf16}, 2-3: {kv_cache: bf16, activation: bf16}", None),
    ],
)
def test_what_has_no_effect_changes_neither_id_nor_heading(layers: str, same: str | None) -> None:
    found = resolve(layers, HYBRID)
    again = parse_heading(found.heading()).resolve(4, modules=HYBRID)
    assert (again.id, again.heading()) == (found.id, found.heading())
    if same is not None:
        assert resolve(same, HYBRID).id == found.id
