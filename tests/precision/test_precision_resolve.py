"""A configuration applied to a model: precedence, phases, experts, exceptions, explanations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.compiler.precision import (
    MIXED_ACTIVATION,
    GroupedModule,
    Phase,
    PrecisionConfig,
    ResolvedPrecision,
    effective_id,
    load_precision,
    normalise_model_name,
    output_format,
    parse_heading,
)
from tilewright.errors import ConfigError


def from_yaml(folder: Path, text: str, name: str = "mine") -> PrecisionConfig:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return load_precision(str(path))


def test_base_gives_every_group() -> None:
    base = load_precision("base").resolve(2)
    assert base.format("ff1_3", layer=1) == "bfp8"
    assert base.format("embedding") == "bf16"
    assert base.fidelity("sdpa", "decode", layer=0) == "hifi2na"
    assert base.fidelity("sdpa", "prefill", layer=0) == "hifi4"
    assert base.fidelity("li_o_prefill", "prefill", layer=0) == "hifi2fp16"
    assert base.fidelity("li_ff1_3", "prefill") == base.fidelity("li_ff1_3", "decode") == "hifi2"
    assert base.fidelity("li_lm_head", "decode") == "hifi2"
    assert base.block_axis == "in"


def test_layer_overrides_change_single_layers(tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path,
        "inherits: performance\n"
        "layers:\n"
        "  0-1: {ff1_3: bf16, li_ff1_3: hifi4}\n"
        "  3: {precision: {ff2: bfp4}, fidelity: {li_ff2_decode: lofi}}\n"
        '  "*.4.mlp.down_proj": {ff2: fp32}\n',
    )
    resolved = config.resolve(5)
    assert [resolved.format("ff1_3", layer=n) for n in range(5)] == ["bf16"] * 2 + ["bfp4"] * 3
    assert [resolved.format("ff2", layer=n) for n in range(5)] == ["bfp8"] * 3 + ["bfp4", "bfp8"]
    assert resolved.fidelity("li_ff1_3", "prefill", layer=1) == "hifi4"
    assert resolved.fidelity("li_ff2", "decode", layer=3) == "lofi"
    assert resolved.fidelity("li_ff2", "prefill", layer=3) == "hifi2"
    assert resolved.format("ff2", layer=4, fqn="model.layers.4.mlp.down_proj") == "fp32"
    assert resolved.format("ff2", layer=3, fqn="model.layers.3.mlp.down_proj") == "bfp4"
    assert [rule.selector for rule in config.layers] == ["0-1", "3", "*.4.mlp.down_proj"]


def test_later_statements_win_and_patterns_beat_indices(tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path,
        'layers: {"*.mlp.*": {ff2: fp32}, "*.mlp.d*": {ff2: bfp2},'
        " 0-3: {ff2: bf16}, 2: {ff2: bfp4}}",
    )
    resolved = config.resolve(4)
    assert resolved.format("ff2", layer=2) == "bfp4"
    assert resolved.format("ff2", layer=2, fqn="layers.2.mlp.down_proj") == "bfp2"
    assert resolved.format("ff2", layer=2, fqn="layers.2.mlp.out") == "fp32"


def test_a_child_overrides_its_base_and_keeps_the_rest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    from_yaml(tmp_path, "precision: {ff2: bfp4, wo: bfp4}\nlayers: {1: {ff2: bf16}}", "parent")
    child = from_yaml(tmp_path / "sub", "inherits: ../parent.yaml\nprecision: {ff2: bfp2}")
    resolved = child.resolve(3)
    assert [resolved.format("ff2", layer=n) for n in range(3)] == ["bfp2", "bf16", "bfp2"]
    assert resolved.format("wo", layer=0) == "bfp4"
    assert child.precision["wo"] == "bfp4"
    assert child.fidelity["li_ff2"] == "hifi2"
    assert list(child.precision)[:6] == ["ff1_3", "ff2", "wqkv", "wo", "kv_cache", "activation"]


def test_setting_both_phases_later_overrides_an_inherited_refinement(tmp_path: Path) -> None:
    from_yaml(tmp_path, "fidelity: {li_ff2_prefill: hifi4, li_ff2: lofi}", "parent")
    parent = load_precision(str(tmp_path / "parent.yaml")).resolve(1)
    assert parent.fidelity("li_ff2", "prefill", layer=0) == "hifi4"
    assert parent.fidelity("li_ff2", "decode", layer=0) == "lofi"
    child = from_yaml(tmp_path, "inherits: parent.yaml\nfidelity: {li_ff2: hifi2}").resolve(1)
    assert child.fidelity("li_ff2", "prefill", layer=0) == "hifi2"


def test_experts_follow_until_they_are_set() -> None:
    follows = parse_heading(
        "precision_cfg = {ff1_3: bfp4}, layer_cfg = {1: {ff1_3: bf16}, *.experts.*: {ff1_3: fp32}}"
    ).resolve(3)
    assert [follows.format("experts_ff1_3", layer=n) for n in range(3)] == ["bfp4", "bf16", "bfp4"]
    assert follows.format("experts_ff1_3", layer=0, fqn="layers.0.experts.1") == "fp32"
    assert follows.format("experts_ff1_3") == "bfp4"
    apart = parse_heading(
        "precision_cfg = {ff1_3: bfp4, experts_ff1_3: bfp2}, layer_cfg = {1: {ff1_3: bf16},"
        " *.experts.*: {ff1_3: fp32}}"
    ).resolve(3)
    assert [apart.format("experts_ff1_3", layer=n) for n in range(3)] == ["bfp2"] * 3
    assert apart.format("experts_ff1_3", layer=0, fqn="layers.0.experts.1") == "bfp2"


def test_experts_set_to_the_same_do_not_follow_a_pattern() -> None:
    config = parse_heading(
        "precision_cfg = {ff2: bfp4, experts_ff2: bfp4}, layer_cfg = {*.mlp.*: {ff2: fp32}}"
    )
    resolved = config.resolve(2)
    assert resolved.format("experts_ff2", layer=0, fqn="layers.0.mlp.experts.1") == "bfp4"
    again = parse_heading(resolved.heading()).resolve(2)
    assert again.format("experts_ff2", layer=0, fqn="layers.0.mlp.experts.1") == "bfp4"


def test_equal_settings_have_equal_ids_and_headings() -> None:
    spelled = [
        "precision_cfg = {ff2: bf16}, layer_cfg = {4-5: {ff2: bfp4}}",
        "precision_cfg = {ff2: bfp4}, layer_cfg = {0-3: {ff2: bf16}}",
        "layer_cfg = {0: {ff2: bf16}, 1: {ff2: bf16}, 2-3: {ff2: bf16}, 4-5: {ff2: bfp4}}",
        "precision_cfg = {ff2: bf16, experts_ff1_3: bfp8}, layer_cfg = {4-5: {ff2: bfp4}, 0: {}}",
    ]
    resolved = [parse_heading(text).resolve(6) for text in spelled]
    assert len({one.id for one in resolved}) == 1
    assert len({one.heading() for one in resolved}) == 1


def test_ids_differ_where_settings_do_and_not_with_the_depth() -> None:
    assert (
        load_precision("performance").resolve(4).id == load_precision("performance").resolve(9).id
    )
    ids = {
        parse_heading(text).resolve(4).id
        for text in (
            "precision_cfg = {}",
            "precision_cfg = {lm_head: bfp4}",
            "layer_cfg = {1: {ff2: bfp4}}",
            "layer_cfg = {2: {ff2: bfp4}}",
            "layer_cfg = {*.2.*: {ff2: bfp4}}",
            "fidelity_cfg = {li_ff2_prefill: hifi4}",
            "block_axis = out",
        )
    }
    assert len(ids) == 7
    assert all(len(one) == 12 for one in ids)


def test_effective_id_ignores_the_order_of_keys() -> None:
    assert effective_id({"a": 1, "b": [2]}) == effective_id({"b": [2], "a": 1})
    assert effective_id({"a": 1}) != effective_id({"a": 2})


@pytest.mark.parametrize("selector", ["4", "2-4", "99"])
def test_layer_out_of_range(selector: str) -> None:
    config = parse_heading(f"layer_cfg = {{{selector}: {{ff2: bf16}}}}")
    message = rf"heading: layers.{selector}: the model has 4 layers; allowed: 0 to 3"
    with pytest.raises(ConfigError, match=message):
        config.resolve(4)


def test_no_layers_at_all() -> None:
    with pytest.raises(ConfigError, match="num_layers = 0; allowed: 1 or more"):
        load_precision("base").resolve(0)


def test_mixed_means_each_ops_own() -> None:
    def output(config: ResolvedPrecision, op: str, phase: Phase) -> str:
        return output_format(op, config.format("activation", layer=0), phase)

    mixed = load_precision("base").resolve(2)
    assert output(mixed, "swiglu", "decode") == output(mixed, "sdpa", "prefill") == "bfp8"
    assert output(mixed, "sdpa", "decode") == "bf16"
    plain = parse_heading("precision_cfg = {activation: bfp8}").resolve(2)
    assert output(plain, "li_qkv", "decode") == "bfp8"
    # Norms and routers stay high, unless everything is higher.
    assert output(plain, "rms_norm", "decode") == "bf16"
    exact = load_precision("reference").resolve(2)
    assert {output(exact, op, "prefill") for op in MIXED_ACTIVATION} == {"fp32"}


def test_model_exceptions() -> None:
    performance = load_precision("performance")
    assert performance.models == ("qwen2.5-7b",)
    for name in ("Qwen2.5-7B", "Qwen/Qwen2.5-7B-Instruct", "qwen-2.5-7b"):
        resolved = performance.resolve(28, name)
        assert resolved.format("ff1_3", layer=0) == "bfp8"
        assert {resolved.format(group, layer=0) for group in ("wqkv", "wo", "kv_cache")} == {"bf16"}
        assert resolved.fidelity("li_qkv", "decode", layer=0) == "hifi4"
        assert resolved.fidelity("li_ff1_3", "decode", layer=0) == "hifi2"
    for name in ("Qwen2.5-72B", "Qwen2.5-7B-Coder", None):
        assert performance.resolve(28, name).heading() == HEADING_PERFORMANCE


HEADING_PERFORMANCE = (
    "precision_cfg = {ff1_3: bfp4, ff2: bfp8, wqkv: bfp8, wo: bfp8, kv_cache: bfp8,"
    " activation: mixed}, fidelity_cfg = {li_ff1_3: lofi, li_ff2: hifi2, li_qkv_decode: hifi2,"
    " li_o_decode: hifi2, sdpa_decode: hifi2na, li_qkv_prefill: hifi2, li_o_prefill: hifi2fp16,"
    " sdpa_prefill: hifi4}"
)


def test_accuracy_by_model() -> None:
    accuracy = load_precision("accuracy")
    for name in ("Llama3.1-8B", "meta-llama/Llama-3.2-11B-Vision-Instruct", "Mistral-7B-v0.3"):
        resolved = accuracy.resolve(32, name)
        assert resolved.format("wqkv", layer=0) == resolved.format("ff1_3", layer=0) == "bfp8"
        assert resolved.fidelity("li_ff2", "prefill", layer=0) == "hifi2fp16"
    for name in ("Llama3.1-70B", "Qwen2.5-72B-Instruct", "Llama-3.2-90B-Vision-Instruct"):
        resolved = accuracy.resolve(80, name)
        assert resolved.heading() == HEADING_PERFORMANCE
        assert resolved.id == load_precision("performance").resolve(80, name).id
    other = accuracy.resolve(30, "SmolLM2-135M-Instruct")
    assert other.format("kv_cache", layer=0) == "bf16"
    assert other.fidelity("sdpa", "prefill", layer=0) == "hifi4"
    assert other.format("ff1_3", layer=0) == "bfp8"


def test_a_child_of_an_exception_still_has_the_last_word(tmp_path: Path) -> None:
    child = from_yaml(tmp_path, "inherits: performance\nprecision: {wo: bfp4}")
    resolved = child.resolve(28, "Qwen2.5-7B")
    assert resolved.format("wo", layer=0) == "bfp4"
    assert resolved.format("wqkv", layer=0) == "bf16"


def test_exceptions_may_have_layers(tmp_path: Path) -> None:
    config = from_yaml(tmp_path, "models: {tiny-1B: {layers: {1: {wo: bfp4}}}}")
    assert config.resolve(2, "Tiny-1B-Chat").format("wo", layer=1) == "bfp4"
    assert config.resolve(1).format("wo", layer=0) == "bfp8"
    with pytest.raises(ConfigError, match=r"models.tiny-1B: layers.1: the model has 1 layers"):
        config.resolve(1, "tiny-1b")


@pytest.mark.parametrize(
    ("name", "normal"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama3-8b"),
        ("Llama3.2-1B", "llama3.2-1b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "llama3.2-11b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral7b"),
        ("Mistral-7B", "mistral7b"),
        ("microsoft/Phi-3.5-mini-instruct", "phi3.5-mini"),
        ("Qwen2.5-7B", "qwen2.5-7b"),
        ("DeepSeek-R1-Distill-Llama-70B", "deepseek-r1-distill-llama-70b"),
        ("SmolLM2-135M-Instruct", "smollm2-135m"),
    ],
)
def test_model_names_are_normalised(name: str, normal: str) -> None:
    assert normalise_model_name(name) == normal
    assert normalise_model_name(normal) == normal


def test_explain_tells_who_set_what(tmp_path: Path) -> None:
    config = from_yaml(
        tmp_path,
        "inherits: performance\nfidelity: {li_ff2_decode: lofi}\n"
        'layers: {0-1: {ff2: bf16}, 3: {li_ff1_3: hifi4}, "*.o_proj": {wo: bfp4}}',
    )
    rows = config.resolve(4, "Qwen2.5-7B").explain()
    mine = str((tmp_path / "mine.yaml").resolve())
    exception = "precision_cfgs/performance.yaml models.Qwen2.5-7B"
    for row in (
        ("all layers", "ff1_3", "bfp8", exception),
        ("all layers", "experts_ff1_3", "bfp8", "as ff1_3"),
        ("all layers", "ff2", "bfp8", "precision_cfgs/base.yaml"),
        ("model", "lm_head", "bfp8", "precision_cfgs/base.yaml"),
        ("model", "block_axis", "in", "precision_cfgs/base.yaml"),
        ("all layers", "li_ff2_prefill", "hifi2", "precision_cfgs/base.yaml"),
        ("all layers", "li_ff2_decode", "lofi", mine),
        ("layers 0-1", "ff2", "bf16", mine),
        ("layers 0-1", "experts_ff2", "bf16", "as ff2"),
        ("layers 0-1", "shared_ff2", "bf16", "as ff2"),
        ("layer 3", "li_ff1_3", "hifi4", mine),
        ("*.o_proj", "wo", "bfp4", mine),
    ):
        assert row in rows
    assert len(rows) == len(set(rows))


def test_explain_leaves_out_groups_without_modules(tmp_path: Path) -> None:
    """Groups outside the layers have no row for a range of layers."""
    config = from_yaml(tmp_path, "layers: {2-3: {ff2: bf16}}")
    modules = [
        *(GroupedModule(f"layers.{layer}.down", "ff2", layer) for layer in range(4)),
        GroupedModule("vision.down", "vision_ff", None),
    ]
    rows = config.resolve(4, modules=modules).explain()
    assert [row[:2] for row in rows if row.source == "as ff2"] == [
        ("model", "vision_ff"),
        ("draft layer", "draft_ff2"),
    ]


def test_explain_tells_what_follows_at_a_layer(tmp_path: Path) -> None:
    """Where they are set, at that layer or everywhere, groups follow nothing."""
    config = from_yaml(
        tmp_path,
        "precision: {shared_ff1_3: bfp2}\n"
        "layers: {0: {experts_ff1_3: bfp4}, 0-1: {ff1_3: bf16}, 3: {wqkv: bf16, router: fp32}}",
    )
    resolved = config.resolve(4)
    rows = [row for row in resolved.explain() if row.scope.startswith("layer ")]
    mine = str((tmp_path / "mine.yaml").resolve())
    assert rows == [
        ("layer 0", "ff1_3", "bf16", mine),
        ("layer 0", "experts_ff1_3", "bfp4", mine),
        ("layer 1", "ff1_3", "bf16", mine),
        ("layer 1", "experts_ff1_3", "bf16", "as ff1_3"),
        ("layer 3", "wqkv", "bf16", mine),
        ("layer 3", "delta_in", "bf16", "as wqkv"),
        ("layer 3", "router", "fp32", mine),
        ("layer 3", "delta_gates", "fp32", "as router"),
    ]
    for scope, group, value, _ in rows:
        assert resolved.format(group, layer=int(scope.removeprefix("layer "))) == value


def test_what_blocks_give_is_as_it_is_until_somebody_sets_it() -> None:
    """A configuration that does not speak of it is the one it was; the heading parses back."""
    plain = load_precision("base").resolve(4)
    assert plain.format("block_output", layer=0) == "mixed"
    same = parse_heading("precision_cfg = {block_output: mixed}").resolve(4)
    assert (same.id, same.heading()) == (plain.id, plain.heading())
    assert "block_output" not in plain.heading()
    found = parse_heading("layer_cfg = {1: {block_output: q80}, *.o_proj: {block_output: q80}}")
    resolved = found.resolve(4)
    names = ("model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj")
    assert [resolved.format("block_output", layer=0, fqn=name) for name in names] == [
        "q80",
        "mixed",
    ]
    assert resolved.format("block_output", layer=1) == "q80" and resolved.id != plain.id
    assert parse_heading(resolved.heading()).resolve(4).id == resolved.id
    assert load_precision("dllama").resolve(4).format("block_output", layer=3) == "q80"
