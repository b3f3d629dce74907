"""Whatever stands in a configuration file, it is read or refused in one line, and soon."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tilewright.compiler.precision import (
    OP_GROUPS,
    TENSOR_GROUPS,
    load_precision,
    parse_heading,
    reading,
)
from tilewright.errors import ConfigError, TilewrightError

same_folder = settings(
    max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

TOP_KEYS = ("precision", "fidelity", "layers", "models", "inherits", "description", "block_axis")
OTHER_KEYS = ("decoders", "precision_cfg", "fidelity_cfg", "FF1_FF3", "ACTIVATION", "Qwen2.5-7B")
OTHER_KEYS += ("0", "1-3", "9", "7-2", "*.mlp.*", "a\nb", "", "<<")

keys = st.sampled_from([*TENSOR_GROUPS, *OP_GROUPS, *TOP_KEYS, *OTHER_KEYS])
leaves = st.one_of(
    st.sampled_from(("bfp8", "BFP4", "hifi4", "HIFI2_NA", "mixed", "out", "base", "x.yaml", "in")),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
)
trees = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    ),
    max_size=4,
)


def read_or_refuse(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    message = ""
    try:
        first = load_precision(str(path)).resolve(4, "Qwen2.5-7B")
        # What was accepted can be written down and read again.
        again = parse_heading(first.heading()).resolve(4)
    except TilewrightError as error:
        message = str(error)
    if not message:
        assert (again.id, again.heading()) == (first.id, first.heading())
        return
    assert len(message.splitlines()) == 1
    assert message.startswith(str(path))
    assert "; allowed: " in message


@same_folder
@given(trees)
def test_json_of_any_shape(tmp_path: Path, tree: dict[str, object]) -> None:
    read_or_refuse(tmp_path / "x.json", json.dumps(tree).encode())


@same_folder
@given(trees)
def test_yaml_of_any_shape(tmp_path: Path, tree: dict[str, object]) -> None:
    read_or_refuse(tmp_path / "x.yaml", yaml.safe_dump(tree, allow_unicode=True).encode())


@same_folder
@given(st.binary(max_size=200), st.sampled_from(("yaml", "json")))
@example(b"\xef\xbb\xbf", "json")
@example(b"\x00", "yaml")
@example(b"a: !!python/name:os.system", "yaml")
@example(b"- &a [*a]", "yaml")
def test_any_bytes(tmp_path: Path, data: bytes, suffix: str) -> None:
    read_or_refuse(tmp_path / f"x.{suffix}", data)


@same_folder
@given(st.lists(st.tuples(st.integers(0, 2000), st.characters()), min_size=1, max_size=6))
def test_a_shipped_file_with_damage(tmp_path: Path, changes: list[tuple[int, str]]) -> None:
    text = list((reading._shipped_folder() / "accuracy.yaml").read_text())
    for place, character in changes:
        text[place % len(text)] = character
    read_or_refuse(tmp_path / "x.yaml", "".join(text).encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        ("yaml", "{" * 100_000),
        ("yaml", "? " * 50_000),
        ("yaml", "- " * 50_000),
        ("yaml", "precision: {ff1_3: " + "!!map {a: " * 20_000),
        ("json", '{"decoders": ' * 15_000),
        ("json", "{" + ", ".join(f'"{n}": 0' for n in range(15_000)) + ', "14999": 0}'),
        ("json", '{"decoders": {"0": ' + "9" * 100_000 + "}}"),
    ],
    ids=["braces", "question marks", "dashes", "tags", "json", "json keys", "json digits"],
)
def test_costly_files_are_refused_soon(tmp_path: Path, suffix: str, text: str) -> None:
    path = tmp_path / f"x.{suffix}"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load_precision(str(path))
    assert time.process_time() - start < 5
    assert len(str(caught.value)) < 600


def test_a_path_that_no_file_can_have() -> None:
    for spec in ("x" * 5000 + ".yaml", "a\0b.json", "\ud800.yaml", "a\nb.yaml"):
        with pytest.raises(ConfigError, match=r"^precision: no file '.*'; allowed: ") as caught:
            load_precision(spec)
        assert len(str(caught.value)) < 600


def test_a_file_with_a_strange_name_is_named_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines.yaml"
    path.write_text("precision: {ff2: bfp5}")
    with pytest.raises(ConfigError, match=r"two\\nlines.yaml': precision: ff2 = 'bfp5'"):
        load_precision(str(path))


def test_a_long_chain_ends_in_a_message(tmp_path: Path) -> None:
    for number in range(reading.MAX_CHAIN + 1):
        parent = f"inherits: {number - 1}.yaml\n" if number else ""
        (tmp_path / f"{number}.yaml").write_text(parent + "precision: {ff2: bf16}")
    assert load_precision(str(tmp_path / "30.yaml")).resolve(1).format("ff2", layer=0) == "bf16"
    with pytest.raises(ConfigError, match=r"inherits too deeply; allowed: a chain of 32 files"):
        load_precision(str(tmp_path / f"{reading.MAX_CHAIN}.yaml"))


@pytest.mark.parametrize("heading", ["", "  ", "\n"])
def test_an_empty_heading_is_not_the_base(heading: str) -> None:
    with pytest.raises(ConfigError, match="nothing in it; allowed: precision_cfg, fidelity_cfg"):
        parse_heading(heading)


@given(st.text(max_size=80))
@example("precision_cfg = {\x1b[31m: bfp8}")
@example("layer_cfg = {\x85: {ff2: bfp8}}")
@example("layer_cfg = {٣: {ff2: bfp8}}")
def test_any_spec(text: str) -> None:
    for read in (load_precision, parse_heading):
        message = "fine"
        try:
            read(text).resolve(4)
        except ConfigError as error:
            message = str(error)
        assert len(message.splitlines()) == 1
