"""Command lines and YAML files of grids: the same words, the same cells."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Refused
from tests.sweep_cells import cell, planned
from tilewright.cli.arguments import sweep as options
from tilewright.cli.arguments.sweep import SweepOptions, _size, read_options
from tilewright.cli.sweep import run, search
from tilewright.compiler.targets.cpu.backend import choose_backend
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.errors import ConfigError

YAML = """\
models: {model}
targets: [cpu, null]
devices: CPU
precisions: [all-q80, all-bfp8]
cases:
  - performance-ci-1
  - performance-top-1
rounds: 2
compute: exact
threads: 1
accuracy_text: held-out
base: all-bfp4
"""
SAME = (
    *("--targets", "cpu", "null", "--devices", "CPU", "--precisions", "all-q80", "all-bfp8"),
    *("--cases", "performance-ci-1", "performance-top-1", "--rounds", "2", "--compute", "exact"),
    *("--threads", "1", "--accuracy-text", "held-out", "--base", "all-bfp4"),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    return str(path)


def test_a_yaml_means_the_same_as_options(tiny_gguf: Path, tmp_path: Path) -> None:
    grid = written(tmp_path, YAML.format(model=tiny_gguf))
    from_yaml = read_options([grid])
    from_line = read_options(["--models", str(tiny_gguf), *SAME])
    assert from_yaml == from_line == read_options(["grid", "--models", str(tiny_gguf), *SAME])
    ids = [each.id for each in run.plan_cells(from_yaml)]
    assert ids == [each.id for each in run.plan_cells(from_line)]
    # a target without a device of its own runs on the host: 2 targets, the base and two others,
    # an accuracy and two rounds
    assert len(ids) == len(set(ids)) == 2 * 3 * 3


def test_the_target_cpu_is_what_runs_it_here(tiny_gguf: Path) -> None:
    grid = ("--models", str(tiny_gguf), "--precisions", "all-q80")
    chosen = choose_backend(silent)[0]
    named = {"cpu-onnxruntime": "cpu", "cpu-native": "cpu-native", "cpu": chosen}
    for name, full in named.items():
        found = read_options([*grid, "--targets", name])
        assert {cell.target for cell in run.plan_cells(found)} == {full}
    both = run.plan_cells(read_options([*grid, "--targets", *named]))
    assert {cell.target for cell in both} == {"cpu", "cpu-native"}


def test_the_command_line_wins_over_the_yaml(tiny_gguf: Path, tmp_path: Path) -> None:
    grid = written(tmp_path, YAML.format(model=tiny_gguf))
    found = read_options([grid, "--rounds", "5", "--base", "bf16", "--targets", "cpu"])
    assert (found.rounds, found.base, found.targets) == (5, "bf16", ("cpu",))
    assert found.precisions == ("all-q80", "all-bfp8") and found.compute == "exact"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("precisions: all-q80\nnosuch: 1\n", ["'nosuch'", "allowed"]),
        ("precisions: all-q80\nlevels: bfp8\n", ["'levels'", "allowed"]),
        ("- all-q80\n", ["map"]),
        ("all-q80\n", ["map"]),
        ("", ["without --precisions"]),
        ("precisions: []\n", ["precisions: no names"]),
        ("precisions:\n", ["precisions: no names"]),
        ("precisions: {a: b}\n", ["precisions: no names"]),
        ("precisions: [[all-q80]]\n", ["precisions: no names"]),
        ("precisions: all-q80\nrounds: many\n", ["rounds: 'many'", "1 to 10000"]),
        ("precisions: all-q80\nrounds: 0\n", ["rounds: '0'", "1 to 10000"]),
        ("precisions: all-q80\nrounds: [3]\n", ["rounds: no value"]),
        ("precisions: all-q80\nthreads: 5000\n", ["threads: '5000'", "1 to 1024"]),
        ("precisions: all-q80\ncompute: slow\n", ["compute: 'slow'", "fast, exact"]),
        ("precisions: all-q80\nbase: [bf16]\n", ["base: no value"]),
        ("precisions: nosuch\n", ["nosuch", "allowed"]),
        ("precisions: all-q80\ncases: nosuch\n", ["unknown case 'nosuch'"]),
        ("precisions: all-q80\nprecisions: all-q40\n", ["given twice", "grid.yaml:2"]),
        ("precisions: [all-q80\n", ["grid.yaml", "YAML"]),
        ("precisions: !!python/object/apply:os.system [ls]\n", ["grid.yaml", "allowed"]),
        ("precisions: &a [*a]\n", ["grid.yaml"]),
        ("models: smollm2\n", ["without --precisions"]),
    ],
)
def test_a_malformed_grid_is_one_line(
    tmp_path: Path, refused: Refused, text: str, words: list[str]
) -> None:
    found = refused(written(tmp_path, text), verb="sweep")
    for word in words:
        assert word in found


def test_a_grid_that_is_no_text_or_a_folder(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "grid.yaml").write_bytes(b"models: \xff\n")
    assert "UTF-8" in refused("grid.yaml", verb="sweep")
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in refused("folder.yaml", verb="sweep")


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("1.2GB", 1_200_000_000), ("300mb", 300_000_000), (" 2kB ", 2000)],
)
def test_sizes(text: str, value: int) -> None:
    assert _size("--memory", text) == value


@given(st.text(max_size=12))
def test_a_size_is_a_number_or_refused(text: str) -> None:
    try:
        found = _size("--memory", text)
    except ConfigError as error:
        message = str(error)
        assert message.startswith("--memory ") and "\n" not in message
    else:
        assert 0 <= found < 10**18


def test_what_was_asked_for_is_kept_and_the_rest_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "x.jsonl")
    usual = read_options(["pareto", "--results", path, "--jobs", "2", "--yes", "--memory", "8GB"])
    assert usual.requested == {}, "where and how it runs does not change what a sweep is"
    assert usual.models == ("smollm2",) and usual.targets == ("cpu",) and usual.rounds == 3
    asked = read_options(["pareto", "--models", "a b", "c", "--rounds", "3"]).requested
    assert asked == {"models": "'a b' c", "rounds": "3"}


def test_results_lie_in_one_folder_by_default() -> None:
    assert read_options(["pareto"]).results == options.DEFAULT_FOLDER / "pareto.jsonl"
    assert read_options(["--precisions", "all-q80"]).results.name == "grid.jsonl"


def test_a_grid_of_a_yaml_is_kept_under_its_name(tmp_path: Path) -> None:
    """Two grids would else want the same file."""
    (tmp_path / "my.nightly.yaml").write_text("precisions: all-q80\n")
    found = read_options([str(tmp_path / "my.nightly.yaml")])
    assert found.results == options.DEFAULT_FOLDER / "my.nightly.jsonl" and found.plan == "grid"
    other = read_options([str(tmp_path / "my.nightly.yaml"), "--results", "here.jsonl"])
    assert other.results == Path("here.jsonl")


@pytest.mark.parametrize("plan", options.PLANS)
def test_the_help_says_what_every_default_is(plan: str) -> None:
    """Or that there is none: an example in a default's place reads like one."""
    switches = ("help", "resume", "other_code", "dry_run", "yes")
    for action in options.parser(plan)._actions:
        assert action.dest in switches or "default: " in (action.help or ""), action.dest


@pytest.mark.parametrize(
    "argv",
    [
        ["--min-top1", "95", "--levels", "q80", "bfp8:lofi", "--rounds", "5"],
        ["--max-kl", "0.05", "--models", "my models/a.gguf", "--from", "a folder/s.jsonl"],
        ["--max-bytes", "1.2GB", "--base", "precision_cfg = {ff2: bfp8}, fidelity_cfg = {}"],
        ["--max-kl", "1", "--threads", "2", "--compute", "exact", "--accuracy-text", "held-out"],
        ["--max-kl", "1", "--cases", "performance-ci-1", "performance-top-1"],
    ],
    ids=lambda argv: argv[0] + argv[2],
)
def test_a_search_resumed_without_options_is_the_search_it_was(
    tmp_path: Path, argv: list[str]
) -> None:
    place = ["--results", str(tmp_path / "a search.jsonl")]
    first = read_options(["search", *argv, *place])
    header = planned("search")
    header.options.update(first.requested)
    journal = run.SweepJournal.create(first.results, header, [cell("a")])
    resumed = read_options(["search", *place, "--resume", "--jobs", "1"])
    assert same_search(search._as_begun(resumed, journal), first)


def same_search(one: SweepOptions, other: SweepOptions) -> bool:
    names = (name for name in SweepOptions.__slots__ if name not in ("resume", "requested"))
    return all(getattr(one, name) == getattr(other, name) for name in names)
