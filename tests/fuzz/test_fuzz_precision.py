"""Configurations and headings that cost: aliases, chains, layers times models, blanks.

What they say is tests/precision's; here they are held to memory and time as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given

from tests.fuzz.limits import guarded
from tests.fuzz.mutations import Mutation, damaged_trees, mutations
from tilewright.compiler.precision import GroupedModule, load_precision, parse_heading, reading
from tilewright.compiler.precision.heading import MAX_HEADING_LENGTH
from tilewright.utils.plain_yaml import MAX_FILE_BYTES

SHIPPED = (reading._shipped_folder() / "accuracy.yaml").read_bytes()
TREE: dict[str, Any] = {
    "inherits": "accuracy",
    "description": "one line",
    "block_axis": "out",
    "precision": {"ff1_3": "bfp4", "activation": "mixed"},
    "fidelity": {"li_ff2": "hifi2", "SDPA_DECODE": "HIFI4"},
    "layers": {"0-3": {"ff2": "bf16"}, "*.mlp.*": {"precision": {"ff2": "bfp8"}}, 2: {}},
    "models": {"Qwen2.5-7B": {"layers": {"1": {"wo": "bfp8"}}, "precision": {"wo": "bf16"}}},
}
DECODERS: dict[str, Any] = {
    "decoders": {"0": {"precision_cfg": {"FF1_FF3": "BFP4", "ACTIVATION": None}}, "3": {}}
}
HEADING = (
    "precision_cfg = {ff1_3: bfp4, ff2: bfp8}, fidelity_cfg = {li_ff2: hifi2}, "
    "layer_cfg = {0-3: {ff2: bf16}, *.mlp.*: {ff2: bfp8}}, block_axis = out"
)


MODULES = [
    GroupedModule(f"model.layers.{layer}.mlp.{name}", group, layer)
    for layer in range(32)
    for name, group in (("up_proj", "ff1_3"), ("down_proj", "ff2"))
]


def resolve(path: Path) -> None:
    load_precision(str(path)).resolve(32, "Qwen2.5-7B", modules=MODULES).explain()


def check(path: Path, data: bytes, **limits: float) -> str:
    path.write_bytes(data)
    return guarded(lambda: resolve(path), file_size=len(data), **limits)


@given(tree=damaged_trees(TREE))
def test_yaml_of_odd_values(tree: Any, scratch: Path) -> None:
    check(scratch / "x.yaml", yaml.safe_dump(tree).encode("utf-8", "surrogatepass"))


@given(tree=damaged_trees(DECODERS))
def test_json_of_odd_values(tree: Any, scratch: Path) -> None:
    check(scratch / "x.json", json.dumps(tree).encode())


@given(mutation=mutations(max_steps=6))
def test_a_damaged_file(mutation: Mutation, scratch: Path) -> None:
    check(scratch / "x.yaml", mutation(SHIPPED))


@given(mutation=mutations(max_steps=6))
@example(mutation=lambda raw: raw.replace(b"0-3", b"0\0-3"))
@example(mutation=lambda raw: raw.replace(b"bf16", b"\x1b"))
def test_a_damaged_heading(mutation: Mutation) -> None:
    text = mutation(HEADING.encode()).decode("utf-8", "replace")
    guarded(lambda: parse_heading(text).resolve(8), file_size=len(text))


BOMB = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
BOMB += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30)]
NESTED = "layers: &l\n" + "".join(f"  '{n}': {{ff2: bfp8}}\n" for n in range(32))
MANY_MODELS = NESTED + "models:\n" + "".join(f"  m{n}: {{layers: *l}}\n" for n in range(5000))
CYCLE = "precision: &p {ff2: *p}\nmodels: &m {a: *m}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bomb.yaml", "\n".join(BOMB)),
        ("layers.yaml", "layers:\n  " + "\n  ".join(BOMB)),
        ("models.yaml", MANY_MODELS),
        ("cycle.yaml", CYCLE),
        ("itself.yaml", "inherits: itself.yaml"),
        ("deep.yaml", "[" * 100_000),
        ("brackets.yaml", "- " + ("[" * 400 + "]" * 400 + "\n- ") * 300),
        ("maps.yaml", "{a: " * 50_000),
        ("dashes.yaml", "- " * 100_000),
        ("keys.yaml", "? " * 100_000),
        ("anchors.yaml", "".join(f"- &a{n} x\n" for n in range(5000))),
        ("long.yaml", "x" * (MAX_FILE_BYTES + 1)),
        ("digits.yaml", "precision: {ff2: " + "9" * 100_000 + "}"),
        ("deep.json", "[" * 200_000),
        ("digits.json", '{"decoders": ' + "9" * 100_000 + "}"),
        ("infinite.json", '{"decoders": Infinity}'),
        ("numbers.json", '{"decoders": {"0": {"precision_cfg": {"ff2": NaN}}}}'),
    ],
)
def test_files_that_cost(name: str, text: str, scratch: Path) -> None:
    assert check(scratch / name, text.encode(), seconds=20, factor=300)


@pytest.mark.parametrize("raw", [b"\xff", b"\0", b"\xef\xbb\xbf{", b"a: \xed\xa0\x80", b"a: \r b"])
def test_bytes_that_are_no_text(raw: bytes, scratch: Path) -> None:
    assert check(scratch / "x.yaml", raw)


@pytest.mark.parametrize(
    ("num_rules", "num_layers"), [(500, 2048), pytest.param(1000, 4096, marks=pytest.mark.slow)]
)
def test_many_rules_for_many_layers(num_rules: int, num_layers: int, scratch: Path) -> None:
    """Kept one by one, what a million settings take would be beyond the bound."""
    last = num_layers - 6
    rules = "".join(f"  '{n % 7:06}-{last - n}': {{ff2: bfp8}}\n" for n in range(num_rules))
    (scratch / "rules.yaml").write_text("layers:\n" + rules)

    def read() -> None:
        load_precision(str(scratch / "rules.yaml")).resolve(num_layers)

    assert guarded(read, file_size=len(rules), seconds=20) == ""


PARTS = [" ", "\n", "a", "{", ",", "a:"]
MORE_PARTS = ["}", "{a: ", "precision_cfg = "]


@pytest.mark.parametrize(
    "part", [*PARTS, *(pytest.param(part, marks=pytest.mark.slow) for part in MORE_PARTS)]
)
def test_long_headings(part: str) -> None:
    text = "precision_cfg = {}" + part * ((MAX_HEADING_LENGTH - 20) // len(part))
    guarded(lambda: parse_heading(text), file_size=len(text), seconds=10, factor=150)
    assert guarded(lambda: parse_heading(text + " " * MAX_HEADING_LENGTH), file_size=len(text))
