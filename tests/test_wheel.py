"""The wheel holds all that an installed Tilewright needs, nothing of the clone, and works alone."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import tiny_gguf
from tilewright.compiler.targets.cpu.native.library import binding, build, recipe

__all__ = ["tiny_gguf"]

ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")


COMPILER = """#!/bin/sh
for word; do last=$word; done
cp "{library}" "$last"
"""
"""Instead of 20 s of a compiler: every output is the tests' own library, of the same sources."""


def pip(*arguments: str | Path, **variables: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    env = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing is left in the clone."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=NOT_COPIED)
    options = ("--no-deps", "--no-build-isolation", "--no-index")
    variables = {}
    if build.find_compiler() is not None:
        compiler = folder / "compiler"
        compiler.write_text(COMPILER.format(library=build.library_path(every_isa=True)))
        compiler.chmod(0o755)
        variables["CXX"] = str(compiler)
    pip("wheel", *options, "--wheel-dir", folder, folder / "source", **variables)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--no-index", "--no-compile", "--target", folder, wheel)
    return folder


def run_installed(installed: Path, code: str) -> str:
    """What `code` prints outside the clone, where only the installed wheel provides Tilewright."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ONLY_WHAT_RUNNING_NEEDS = """
import importlib.machinery, importlib.metadata as metadata, re, sys

def name_of(requirement):
    return re.match("[A-Za-z0-9_.-]+", requirement)[0].lower().replace("_", "-")

needed, waiting = set(), ["tilewright"]
while waiting:
    name = waiting.pop()
    if name not in needed:
        needed.add(name)
        try:
            found = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        waiting += [name_of(each) for each in found if "extra ==" not in each]
hidden = {
    package
    for package, owners in metadata.packages_distributions().items()
    if not needed & {name_of(owner) for owner in owners}
}
assert {"pytest", "hypothesis", "transformers"} <= hidden, hidden  # triton may be torch's own

class Needed(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Needed
"""


def in_clone(*patterns: str) -> set[str]:
    found = (path for pattern in patterns for path in ROOT.glob(pattern))
    return {path.relative_to(ROOT).as_posix() for path in found}


def in_wheel(*patterns: str) -> set[str]:
    """Where the clone's files of these patterns lie in the wheel."""
    return {"tilewright/" + name.removeprefix("tilewright/") for name in in_clone(*patterns)}


def test_wheel_holds_the_sources_and_the_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = in_wheel(
        "tilewright/*.py",
        "compiler/**/*.py",
        "models/**/*.py",
        "precision_cfgs/*.yaml",
        "tilewright/**/*.py",
        "tilewright/evaluate/cases/texts/*.txt",
    )
    assert expected >= {
        "tilewright/precision_cfgs/performance.yaml",
        "tilewright/precision_cfgs/base.yaml",
    }
    assert expected <= names, sorted(expected - names)


def test_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tilewright"}
    assert not [name for name in names if re.search(r"(^|/)(tests|__pycache__)/|/test_", name)]
    assert not [name for name in names if "/demo/" in name]


def test_wheel_carries_the_licence_and_the_version(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("dist-info/METADATA"))
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    version = wheel.name.split("-")[1]
    assert f"Version: {version}" in text
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_the_wheel_has_the_kernels_and_builds_nothing(wheel: Path, installed: Path) -> None:
    assert platform.machine() in wheel.name
    code = (
        "import os\nos.environ['CXX'] = 'no-such-compiler'\n"
        "from tilewright.compiler.targets.cpu.native.library import binding, build\n"
        "print(build.library_path())\nprint(binding.library().tw_best_isa())\n"
    )
    path, best = run_installed(installed, code).splitlines()
    assert Path(path).is_relative_to(installed) and Path(path).name == recipe.packaged_name()
    assert int(best) == binding.library().tw_best_isa()


def test_installed_wheel_finds_its_data(installed: Path) -> None:
    code = (
        "import tilewright.compiler\n"
        "from tilewright.compiler.precision import list_precisions\n"
        "from tilewright.evaluate.cases.prompts import bench_text, sample_prompts\n"
        "print(tilewright.compiler.__file__)\n"
        "print(len(sample_prompts('questions.json')), bench_text('accuracy.txt')[:18])\n"
        "print(*list_precisions())\n"
    )
    location, prompts, precisions = run_installed(installed, code).splitlines()
    assert Path(location).is_relative_to(installed)
    assert prompts == "32 The Craft of Measu"
    named = {Path(name).stem for name in in_clone("precision_cfgs/*.yaml")}
    assert set(precisions.split()) == named


def test_installed_command_prints_its_version(wheel: Path, installed: Path) -> None:
    code = "from tilewright.cli.main import main; raise SystemExit(main(['--version']))"
    assert wheel.name.split("-")[1] in run_installed(installed, code)
    scripts = (next(installed.glob("*.dist-info")) / "entry_points.txt").read_text()
    assert "tilewright = tilewright.cli.main:main" in scripts


def test_a_model_runs_where_only_its_dependencies_are(installed: Path, tiny_gguf: Path) -> None:
    """As `make demo` installs them: what else the tests' environment holds cannot be imported."""
    argv = ["bench", "--model", str(tiny_gguf), "--prompt", "hello", "--no-results"]
    argv += ["--max-generated-tokens", "2", "--repeat-batches", "1"]
    code = "from tilewright.cli.main import main\n"
    code += f"print(main.__code__.co_filename)\ncode = main({argv})\n"
    code += "assert not hidden & {*sys.modules}, hidden & {*sys.modules}\nraise SystemExit(code)"
    location, *out = run_installed(installed, ONLY_WHAT_RUNNING_NEEDS + code).splitlines()
    assert Path(location).is_relative_to(installed)
    assert any("decode (t/s/u)" in line for line in out)
