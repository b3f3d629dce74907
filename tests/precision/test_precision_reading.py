"""Where configurations come from: shipped names, YAML, per-decoder JSON; and what is refused."""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tilewright.compiler.precision import list_precisions, load_precision, parse_heading, reading
from tilewright.errors import ConfigError
from tilewright.utils.plain_yaml import MAX_FILE_BYTES

WEIGHT_GROUPS = ("ff1_3", "ff2", "wqkv", "wo", "lm_head")
# The published headings in their order, as configurations of their own.
PUBLISHED = (
    *(f"mlp-{ff1_3}-{ff2}" for ff1_3, ff2 in product(("bfp4", "bfp8", "bf16"), repeat=2)),
    *(f"wo-bfp4-activation-{activation}" for activation in ("bf16", "bfp8", "mixed")),
)
HEADINGS = (Path(__file__).parents[1] / "goldens" / "seed_headings.txt").read_text().splitlines()


def test_names() -> None:
    expected = ("accuracy", "base", "bf16", "performance", "reference")
    expected += ("all-bfp4", "all-bfp8", "all-fp8", "all-q40", "all-q80", "dllama")
    expected += ("pure-q40", "pure-q80", "q50-head-q80")
    expected += ("smollm2-cpu-top1-95", "stored", "stored-float-head", "stored-float-prefill")
    assert tuple(list_precisions()) == tuple(sorted((*expected, *PUBLISHED)))


@pytest.mark.parametrize("name", list_precisions())
def test_shipped_configurations(name: str) -> None:
    config = load_precision(name)
    assert config.name == name
    assert len(config.description) > 20
    assert list_precisions()[name] == config.description
    # what a search found has rules for the layers of its model, of which the smallest has 30
    num_layers = 30 if config.layers else 4
    resolved = config.resolve(num_layers)
    assert parse_heading(resolved.heading()).resolve(num_layers).id == resolved.id


@pytest.mark.parametrize(("name", "heading"), list(zip(PUBLISHED, HEADINGS, strict=True)))
def test_published_headings_have_names(name: str, heading: str) -> None:
    """Character for character, for every model, and back to the same configuration."""
    config = load_precision(name)
    for num_layers, model in product((1, 28, 80), (None, "Qwen2.5-7B", "Llama-3.1-8B")):
        resolved = config.resolve(num_layers, model)
        assert resolved.heading() == heading
        assert parse_heading(heading).resolve(num_layers, model).id == resolved.id


def test_published_configurations_differ() -> None:
    ids = [load_precision(name).resolve(28).id for name in PUBLISHED]
    assert len(set(ids)) == 12
    for named, same in (("base", "mlp-bfp8-bfp8"), ("performance", "mlp-bfp4-bfp8")):
        assert load_precision(named).resolve(28).id == load_precision(same).resolve(28).id


@pytest.mark.parametrize(
    ("name", "weight", "kv", "activation", "embedding", "fidelity"),
    [
        ("reference", "fp32", "fp32", "fp32", "fp32", "hifi4fp32"),
        ("bf16", "bf16", "bf16", "bf16", "bf16", "hifi4"),
        ("all-bfp8", "bfp8", "bfp8", "mixed", "bf16", "hifi2"),
        ("all-bfp4", "bfp4", "bfp8", "mixed", "bf16", "lofi"),
        ("all-q80", "q80", "bfp8", "mixed", "bf16", "hifi2"),
        ("all-q40", "q40", "bfp8", "mixed", "bf16", "lofi"),
    ],
)
def test_uniform_configurations(
    name: str, weight: str, kv: str, activation: str, embedding: str, fidelity: str
) -> None:
    config = load_precision(name)
    assert {config.precision[group] for group in WEIGHT_GROUPS} == {weight}
    assert config.precision["kv_cache"] == kv
    assert config.precision["activation"] == activation
    assert config.precision["embedding"] == embedding
    linear = {value for key, value in config.fidelity.items() if key.startswith("li_")}
    assert linear == {fidelity}


def test_found_without_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed elsewhere: precision_cfgs is then found as a package on the path."""
    shutil.copytree(reading._shipped_folder(), tmp_path / "site" / "precision_cfgs")
    monkeypatch.setattr(reading, "__file__", str(tmp_path / "a" / "compiler" / "p" / "r.py"))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert reading._shipped_folder().parts[-1] == "precision_cfgs"
    assert load_precision("performance").precision["ff1_3"] == "bfp4"


def test_missing_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "__file__", str(tmp_path / "a" / "compiler" / "p" / "r.py"))
    monkeypatch.setattr(reading, "FOLDER", "no_such_folder_anywhere")
    with pytest.raises(ConfigError, match="is missing; allowed: a complete installation"):
        list_precisions()


@pytest.mark.parametrize(
    "spec", ["fast", "", "../base", "base.yam", "a\nb", "x" * 500, "/etc/passwd", "no.yaml"]
)
def test_unknown_name_or_path(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed: accuracy, all-bfp4, .*, a heading") as caught:
        load_precision(spec)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def refused(folder: Path, text: str | bytes, message: str, suffix: str = "yaml") -> None:
    path = folder / f"bad.{suffix}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_precision(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert "allowed: " in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("precisions: {ff2: bf16}", "unknown key 'precisions'; allowed: precision, fidelity, lay"),
        ("inherit: base", "block_axis, inherits, description; did you mean 'inherits'?"),
        ("precision: {ff7: bf16}", "precision: unknown key 'ff7'; allowed: ff1_3, ff2, wqkv, wo,"),
        ("precision: {ff2: bpf8}", "q50, q51, nvfp4, mxfp4, stored; did you mean 'bfp8'?"),
        ("precision: {li_ff2: lofi}", "precision: unknown key 'li_ff2'; allowed: ff1_3"),
        ("precision: {ff2: mixed}", "precision: ff2 = 'mixed'; allowed: fp32, bf16, fp16, bfp8"),
        ("precision: {router: bfp4}", "router = 'bfp4'; allowed: fp32, bf16, fp16"),
        ("precision: {kv_cache: bfp2}", "kv_cache = 'bfp2'; allowed: fp32, bf16, fp16, bfp8, bfp4"),
        ("precision: {kv_cache: q80}", "kv_cache = 'q80'; allowed: fp32, bf16, fp16, bfp8, bfp4"),
        ("precision: {activation: q40}", "activation = 'q40'; allowed: fp32, bf16, fp16, bfp8, b"),
        ("precision: {router: q40}", "router = 'q40'; allowed: fp32, bf16, fp16"),
        (
            "precision: {ff2: q42}",
            "ff2 = 'q42'; allowed: .*, q40, q80, q41, q50, q51, nvfp4, mxfp4, stored",
        ),
        ("precision: {ff2: Q4_K}", "ff2 = 'q4_k', which only a file holds weights in; allowed: "),
        ("precision: {kv_cache: stored}", "kv_cache = 'stored'; allowed: fp32, bf16, fp16, bfp8"),
        ("precision: {ff2: ''}", "ff2 = ''; allowed: "),
        ("precision: {ff2: [bf16]}", "ff2 has a list; allowed: a name"),
        ("precision: [ff2]", "precision: a list; allowed: a map"),
        ("- ff2", "a list; allowed: a map"),
        ("fidelity: {li_ff2: hifi9}", "li_ff2 = 'hifi9'; allowed: lofi, hifi2, hifi2na"),
        ("layers: {0: {ff7: bf16}}", "layers.0: unknown key 'ff7'"),
        ("layers: {5-2: {ff2: bf16}}", "layers.5-2: the range is empty"),
        ("layers: {'-1': {ff2: bf16}}", "layers.-1: not a layer"),
        ("layers: {'a b': {ff2: bf16}}", "layers.a b: not a layer"),
        ("layers: {1: bf16}", "layers.1: a str; allowed: a map"),
        ("models: {A-1B: {model: x}}", "models.A-1B: unknown key 'model'; allowed: precision"),
        (
            "models: {A-1B: {}, a-1b: {}}",
            "models.a-1b: this model is listed twice; allowed: once",
        ),
        ("models: {A-1B: {block_axis: out}}", "models.A-1B: unknown key 'block_axis'"),
        ("block_axis: both", "block_axis = 'both'; allowed: in, out"),
        ("block_axis: [in]", "block_axis = a list; allowed: in, out"),
        ("description: [a]", "description is not one line; allowed: one line"),
        ('description: "a\\nb"', "description is not one line"),
        ("inherits: nobody", "inherits: unknown precision 'nobody'; allowed: accuracy"),
        ("inherits: nobody.yaml", "inherits: no file '.*nobody.yaml'; allowed: accuracy"),
        ("inherits: bad.yaml", r"inherits itself: .* -> .*bad.yaml; allowed: a chain that ends"),
        ("precision: {ff2: bf16, ff2: bfp8}", ":1: 'ff2' is given twice; allowed: YAML, each key"),
        ("precision: {ff2: bf16, FF2: bfp8}", "precision: ff2 is given twice"),
        ("precision: {}\nfidelity: {}\nprecision: {}", ":3: 'precision' is given twice"),
        ("precision: {<<: {ff2: bf16}}", "unknown key '<<'"),
        ("precision: {[a]: bf16}", ":1: .*no name"),
        ("precision: {ff2: bf16", ":1: .*; allowed: YAML"),
        ("precision: !!python/object/apply:os.getcwd []", ":1: could not determine a constructor"),
        ("precision: !!map [a]", ":1: not a map"),
        ("precision: {ff2: !!int 3}", ":1: could not determine a constructor for the tag '.*:int'"),
        ("precision: {ff2: !!bool maybe}", ":1: could not determine a constructor"),
        ("precision: {ff2: !!timestamp now}", ":1: could not determine a constructor"),
        ('precision: {ff2: "\\UFFFFFFFF"}', "a number out of range; allowed: plain text"),
        ("%YAML " + "9" * 5000 + ".1\n---\na: b", "a number out of range; allowed: plain text"),
        ('layers: {"a\\nb": {}}', ":1: a key that is no name"),
        ("models: {" + "m" * 201 + ": {}}", ":1: a key that is no name"),
        ("layers: {0: {ff2: bf16, fidelity: {li_ff2: lofi}}}", "layers.0: two spellings at once"),
        ("precision: &a {ff2: *a}", "ff2 has a dict; allowed: a name"),
        ("a: " + "[" * 3000, "nested too deeply; allowed: plain maps"),
        (b"\xff\xfe", "byte 0 is bad; allowed: UTF-8 text"),
        ("#" * (MAX_FILE_BYTES + 1), r"too large; allowed: up to \d+ bytes"),
    ],
)
def test_refused_yaml(tmp_path: Path, text: str | bytes, message: str) -> None:
    refused(tmp_path, text, message)


def test_longer_cycles_and_self_named_files(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("inherits: bad.yaml")
    refused_text = "inherits: b.yaml"
    path = tmp_path / "bad.yaml"
    path.write_text(refused_text)
    with pytest.raises(ConfigError, match=r"bad.yaml -> .*b.yaml -> .*bad.yaml"):
        load_precision(str(path))
    # A file of one's own called base stands on the shipped one.
    mine = tmp_path / "base.yaml"
    mine.write_text("precision: {wo: bfp4}")
    assert load_precision(str(mine)).precision["ff2"] == "bfp8"


def test_an_alias_bomb_is_cheap(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
    refused(tmp_path, "\n".join(lines), "unknown key 'a0'")
    refused(tmp_path, "precision:\n  " + "\n  ".join(lines), "unknown key 'a0'")


def test_a_path_with_the_words_of_a_heading_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "precision_cfg=1"
    folder.mkdir()
    (folder / "block_axis=out.yaml").write_text("block_axis: out")
    assert load_precision(str(folder / "block_axis=out.yaml")).block_axis == "out"


def test_a_folder_or_device_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="no file"):
        load_precision(str(tmp_path / "folder.yaml"))


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "locked.yaml"
    path.write_text("precision: {}")

    def fail(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    real_open = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda p, *a, **k: fail() if p.name == "locked.yaml" else real_open(p, *a, **k),
    )
    with pytest.raises(ConfigError, match="Permission denied; allowed: a readable file"):
        load_precision(str(path))


def test_upper_case_and_empty_maps_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "upper.yml"
    path.write_text("precision: {FF1_FF3: BFP4}\nfidelity: {LI_FF1_FF3: HIFI2_FP16}\nlayers:\n")
    resolved = load_precision(str(path)).resolve(2)
    assert resolved.format("ff1_3", layer=0) == "bfp4"
    assert resolved.fidelity("li_ff1_3", "prefill", layer=0) == "hifi2fp16"


def test_block_axis_in_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "columns.yaml"
    path.write_text("inherits: all-q40\nblock_axis: out")
    resolved = load_precision(str(path)).resolve(3)
    assert resolved.block_axis == "out"
    assert resolved.heading().endswith(", block_axis = out")
    assert load_precision(resolved.heading()).resolve(3).id == resolved.id
    along_in = load_precision("all-q40").resolve(3)
    assert along_in.heading() + ", block_axis = out" == resolved.heading()
    assert along_in.id != resolved.id
    child = tmp_path / "back.yaml"
    child.write_text("inherits: columns.yaml\nblock_axis: in")
    assert load_precision(str(child)).resolve(3).id == along_in.id


def test_ggml_formats_in_every_spelling(tmp_path: Path) -> None:
    groups = ("FF1_FF3", "WQKV", "LM_HEAD", "EMBEDDING", "EXPERTS_FF2")
    spelled = ", ".join(f"{group}: Q4_0" for group in groups)
    path = tmp_path / "ggml.yaml"
    path.write_text(f"precision: {{{spelled}, wo: q80}}")
    resolved = load_precision(str(path)).resolve(2)
    for group in ("ff1_3", "wqkv", "lm_head", "embedding", "experts_ff2"):
        assert resolved.format(group, layer=0) == "q40"
    assert "wqkv: q40, wo: q80" in resolved.heading()
    decoder = {"precision_cfg": {"FF2": "Q8_0", "WO": "Q40"}}
    config = load_precision(write_json(tmp_path, {"decoders": {"0": decoder}}))
    assert config.resolve(2).format("ff2", layer=0) == "q80"
    assert config.resolve(2).format("wo", layer=0) == "q40"


UPPER = {
    "precision_cfg": {
        "FF1_FF3": "BFP4",
        "FF2": "BFP8",
        "WQKV": "BFP8",
        "WO": "BFP8",
        "KV_CACHE": "BFP8",
        "ACTIVATION": None,
    },
    "fidelity_cfg": {
        "LI_FF1_FF3": "LOFI",
        "LI_FF2": "HIFI2_FP16",
        "LI_QKV_DECODE": "HIFI2",
        "LI_O_DECODE": "HIFI2",
        "SDPA_DECODE": "HIFI2_NA",
        "LI_QKV_PREFILL": "HIFI2",
        "LI_O_PREFILL": "HIFI4_FP32",
        "SDPA_PREFILL": "HIFI4",
    },
}


def write_json(folder: Path, body: object) -> str:
    path = folder / "decoders.json"
    path.write_text(body if isinstance(body, str) else json.dumps(body))
    return str(path)


def test_per_decoder_json(tmp_path: Path) -> None:
    lower = {"precision_cfg": {"ff1_3": "bf16", "activation": "bfp8"}}
    config = load_precision(write_json(tmp_path, {"decoders": {"0": UPPER, "2": lower}}))
    resolved = config.resolve(4)
    assert [resolved.format("ff1_3", layer=n) for n in range(4)] == ["bfp4", "bfp8", "bf16", "bfp8"]
    assert resolved.format("activation", layer=0) == "mixed"
    assert resolved.format("activation", layer=2) == "bfp8"
    assert resolved.fidelity("li_ff2", "decode", layer=0) == "hifi2fp16"
    assert resolved.fidelity("sdpa", "decode", layer=0) == "hifi2na"
    assert resolved.fidelity("li_o", "prefill", layer=0) == "hifi4fp32"
    assert resolved.fidelity("li_ff2", "decode", layer=1) == "hifi2"
    with pytest.raises(ConfigError, match=r"layers.2: the model has 2 layers; allowed: 0 to 1"):
        config.resolve(2)


def test_json_of_equal_decoders_is_the_plain_heading(tmp_path: Path) -> None:
    config = load_precision(write_json(tmp_path, {"decoders": {str(n): UPPER for n in range(3)}}))
    heading = config.resolve(3).heading()
    assert heading.startswith("precision_cfg = {ff1_3: bfp4, ff2: bfp8,")
    assert "layer_cfg" not in heading


def test_json_may_name_its_base(tmp_path: Path) -> None:
    path = write_json(tmp_path, {"inherits": "bf16", "decoders": {"0": UPPER}})
    assert load_precision(path).resolve(2).format("wo", layer=1) == "bf16"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"decoder": {}}, "unknown key 'decoder'; allowed: decoders"),
        ({"decoders": {}}, "no decoders; allowed: one entry or more"),
        ({"decoders": [1]}, "decoders: a list; allowed: a map"),
        ({"decoders": {"first": {}}}, "decoders.first: not a decoder; allowed: its index"),
        ({"decoders": {"0": {"cfg": {}}}}, "decoders.0: unknown key 'cfg'; allowed: precision_cfg"),
        ({"decoders": {"0": {"precision_cfg": {"FF3": "BFP8"}}}}, "unknown key 'FF3'; allowed: ff"),
        ({"decoders": {"0": {"precision_cfg": {"FF2": None}}}}, "ff2 has a NoneType; allowed"),
        ({"decoders": {"0": {"precision_cfg": {"FF2": 8}}}}, "ff2 has a int; allowed: a name"),
        ({"decoders": {"0": {"fidelity_cfg": {"LI_FF2": "HIFI9"}}}}, "li_ff2 = 'hifi9'; allowed"),
        ('{"decoders": {"0": {}, "0": {}}}', "'0' is given twice; allowed: once"),
        ({"decoders": {"a\nb": {}}}, r"'a\\nb' is no name; allowed: printable keys"),
        ({"decoders": {"9" * 300: {}}}, "9' is no name; allowed: printable keys"),
        ('{"decoders": ', ":1: not read; allowed: JSON of plain maps"),
        ("[" * 100_000, "not read; allowed: JSON"),
        ('{"inherits": 3, "decoders": {"0": {}}}', "inherits is not one line"),
    ],
)
def test_refused_json(tmp_path: Path, body: object, message: str) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    refused(tmp_path, text, message, suffix="json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="precision: {}[]&*!<ff2,bf16\n\t-'\"|>#%@`~", max_size=80))
def test_any_yaml_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any.yaml"
    path.write_text(text)
    message = "allowed: "
    try:
        load_precision(str(path)).resolve(2)
    except ConfigError as error:
        message = str(error)
    assert "allowed: " in message and "\n" not in message
