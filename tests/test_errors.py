"""What messages say is allowed, and what the closest of it is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tilewright.cli.main import main
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.table import get_target
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import CASES
from tilewright.options.arguments import declared
from tilewright.options.engine_config import EngineConfig

ROOT = Path(__file__).resolve().parents[1]


def test_the_closest_name_is_proposed_and_nothing_that_is_far() -> None:
    assert allowed(["performance", "accuracy"], "acuracy").endswith("; did you mean 'accuracy'?")
    assert allowed(["performance", "accuracy"], "ACCURACY").endswith("did you mean 'accuracy'?")
    for given in ("xyz", "", 3, None, "a" * 10_000):
        assert allowed(["performance", "accuracy"], given) == "allowed: performance, accuracy"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["rum"], "run"),
        (["run", "--target", "n15o"], "n150"),
        (["bench", "--case", "performance-bach-1"], "performance-batch-1"),
        (["run", "--precision", "acuracy"], "accuracy"),
        (["run", "--model", "shape:llama-3.1-8"], "shape:llama-3.1-8b"),
        (["sweep", "paretto"], "pareto"),
        (["sweep", "grid", "--precisions", "all-bpf8"], "all-bfp8"),
    ],
)
def test_a_mistyped_name_of_a_command_line(
    argv: list[str], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "allowed: " in line and line.endswith(f"did you mean {name!r}?")


def test_the_tables_themselves_propose() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cuda'"):
        get_target("cud")
    with pytest.raises(ConfigError, match="did you mean 'accuracy-ci-1'"):
        _ = CASES["acuracy-ci-1"]
    with pytest.raises(ConfigError, match="did you mean 'dllama'"):
        load_precision("dlama")


RENAMED = {
    *("--tensor-parallel", "--expert-parallel", "--exchange", "--wire", "--peer-limit"),
    *("--max-seats", "--max-context", "--step-tokens", "--memory-fraction", "--copies"),
    *("--arithmetic", "--step-ms", "--no-prefix-cache", "--cache-replies", "--host-cache"),
}
"""Older flags of `EngineConfig` that no command has as its own."""


def test_texts_name_options_by_their_names_in_the_help() -> None:
    """Errors, notes and help: every text of the product but the declaration of the old names."""
    aliases = {alias for made in declared(EngineConfig).values() for alias in made.aliases}
    assert aliases >= RENAMED
    for folder in ("compiler", "models", "tilewright"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "engine_config.py" and path.parent.name == "options":
                continue
            said = set(re.findall(r"--[a-z][a-z-]*[a-z]", path.read_text(encoding="utf-8")))
            assert not said & RENAMED, path


def test_what_is_said_to_be_installed_is_there_to_install() -> None:
    """Printed as the README has it, from the clone: no registry has the package."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    said = set[str]()
    folders = ("compiler", "models", "tilewright", "demo", "bench")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for path in (*sources, *documents):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install ['\"]?tilewright|['\"]tilewright\[", text), path
        found = re.findall(r"(?:pip install -e ['\"]|`)\.\[([\w,]+)\]['\"`]", text)
        named = {name for names in found for name in names.split(",")}
        assert named <= extras.keys(), path
        said |= named if path in sources else set()
    assert said == {"boards", "cuda", "plot", "ray", "serve", "show", "vision"}
