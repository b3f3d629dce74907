"""Ways to load an engine.py: by path, by name, in other processes, with and without Triton."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5_moe import make
from tests.targets.cuda.engine_generator.conftest import CONFIG, Folder
from tests.tiny import lowered
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Choices,
    NativeChoices,
    Plan,
)
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.compiler.targets.cuda.lowering import lower_to_program

NAME = "engine"
NATIVE = NativeChoices(products="cuda", native=("experts", "attention", "delta"))

CHILDREN = """
import multiprocessing, pickle
import torch
import engine

if __name__ == "__main__":
    for each in (engine.Engine, engine.Settings, engine.CudaSequence, engine.EngineError):
        assert pickle.loads(pickle.dumps(each)) is each
    made = engine.create_engine({config!r}, {folder!r}, "cpu")
    ours = made.prefill([1], [torch.arange(5)])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        theirs = pool.apply(engine.create_engine, ({config!r}, {folder!r}, "cpu"))
    assert torch.equal(theirs.prefill([1], [torch.arange(5)]), ours)
"""


@pytest.fixture(scope="module")
def texts(plan: Plan) -> dict[str, str]:
    """Files of a dense model and of a mixture with linear attention, by their choices."""
    graph, _ = lowered(make(), target="cuda", precision=load_precision("reference"))
    mixture = engine_plan(lower_to_program(graph))
    chosen = {
        "dense": (plan, Choices()),
        "dense, CUDA C++": (plan, Choices(products="cuda")),
        "mixture": (mixture, Choices()),
        "mixture, CUDA C++": (mixture, NATIVE),
    }
    return {k: engine_text(*each, title="a test", num_layers=2) for k, each in chosen.items()}


def by_path(path: Path, name: str, *, registered: bool) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if registered:
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_engine_file_binds_each_name_once(texts: dict[str, str]) -> None:
    for kind, text in texts.items():
        python = re.sub(r'r""".*?"""', "", text, flags=re.DOTALL)
        names: list[str] = re.findall(r"^(?:def |class |)(\w+)(?=[(:,]| =)", python, re.M)
        assert [name for name, count in Counter(names).items() if count > 1] == [], kind
        assert {"Engine", "MOST_ROWS"} <= {*names}


@pytest.mark.parametrize("kind", ["dense", "dense, CUDA C++", "mixture", "mixture, CUDA C++"])
@pytest.mark.parametrize("triton", ["with Triton", "without"])
def test_engine_file_loads_by_path_and_by_name(
    kind: str, triton: str, texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if triton == "without":
        for name in ("triton", "triton.language"):
            monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / f"{NAME}.py"
    path.write_text(texts[kind], "utf-8")
    for name in ("one", "other", NAME):
        monkeypatch.delitem(sys.modules, name, raising=False)
    first = by_path(path, "one", registered=False)
    assert "one" not in sys.modules
    second = by_path(path, "other", registered=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    third = importlib.import_module(NAME)
    for module in (first, second, third):
        assert module.create_engine.__module__ == module.__name__
    assert first.main(["--self-test", "--device", "cpu", "--operations", "1"]) == 0
    assert first.Engine is not second.Engine
    assert pickle.loads(pickle.dumps(third.Engine)) is third.Engine
    for name in ("other", NAME):
        monkeypatch.delitem(sys.modules, name)


def test_two_loads_of_a_file_answer_alike(engine_file: Path, folder: Folder) -> None:
    made, prompt = folder(), torch.arange(5)
    modules = [by_path(engine_file, name, registered=False) for name in ("a", "b")]
    engines: list[Any] = [each.create_engine(CONFIG, made, "cpu") for each in modules]
    one, other = (each.prefill([1], [prompt]) for each in engines)
    assert torch.equal(one, other)


def test_engine_file_loads_in_spawned_children_from_another_folder(
    engine_file: Path, folder: Folder, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(CHILDREN.format(config=CONFIG, folder=folder()), "utf-8")
    (tmp_path / "elsewhere").mkdir()
    ran = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        cwd=tmp_path / "elsewhere",
        env={"PYTHONPATH": str(engine_file.parent), "OMP_NUM_THREADS": "1"},
    )
    assert (ran.returncode, ran.stderr) == (0, "")
