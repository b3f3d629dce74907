"""Strict steps: when the promise is made, and that it is kept on a GPU."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.targets.cuda import strict_steps
from tests.targets.cuda.sharing import set_sharing
from tests.tiny import compiled, precision_of, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda import invariance
from tilewright.compiler.targets.cuda import memory_budget as device
from tilewright.compiler.targets.cuda.invariance import can_promise, invariant_of
from tilewright.compiler.targets.cuda.steps.matmul import MatmulOps
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.utils.child_process import PYTHON

ROOT = Path(__file__).parents[3]
STRICT = CompileOptions(max_batch=16, is_strict=True)
PLAN: Any = None  # which only `has_mixers` looks at


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What is promised, on a machine with our own kernels and the workspace withheld."""
    monkeypatch.setattr(invariance, "has_mixers", lambda plan: False)
    for name, value in invariance._WITHHELD.items():
        monkeypatch.setenv(name, value)
    return lambda options, has_cpp=True: invariant_of(PLAN, options, has_cpp)


def test_rows_are_promised_where_all_of_it_is_there(
    promised: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert promised(STRICT) == "rows"
    assert promised(replace(STRICT, is_strict=False)) == "none"
    assert promised(replace(STRICT, compute="exact")) == "none"
    assert promised(replace(STRICT, max_batch=4096)) == "rows", "of any number of slots"
    assert promised(CompileOptions(max_batch=256, strict_rows=16)) == "rows", "of small steps"
    with monkeypatch.context() as patched:
        patched.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        assert promised(STRICT) == "none", "the library may split sums"
    assert promised(STRICT, False) == "none", "no compiler, or another GPU"
    monkeypatch.setattr(invariance, "has_mixers", lambda plan: True)
    assert promised(STRICT) == "none" and not can_promise(PLAN, STRICT), "experts"


def test_strict_steps_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels in Triton, the library on the CPU: alone, in 16 rows, and beside a prompt's piece."""
    monkeypatch.setattr(device, "invariant_of", lambda *_: "rows")
    for name, value in {"_PIECE": 3, "_STEPS": 2, "_COMPANIES": (10,), "_CUTS": ()}.items():
        monkeypatch.setattr(strict_steps, name, value)
    draw = torch.randint
    short = lambda low, high, shape: draw(low, 50, (min(shape[0], 5),))  # noqa: E731
    monkeypatch.setattr(torch, "randint", short)
    size: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}
    options = {"compute": "fast", "max_batch": 12, "max_context": 64}
    model, precision = tiny_model(std=0.2, **size), precision_of("bf16")
    executable = compiled(model, "cuda", precision=precision, **options)
    assert not executable.capabilities.passes and executable.capabilities.max_prompts == 1
    assert strict_steps.compare(executable, lengths=(5,)) == 0


@pytest.mark.parametrize("is_strict", [False, True])
def test_steps_select_strict_kernels_by_the_number_of_open_sequences(
    is_strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "invariant_of", lambda *_: "rows")
    set_sharing(monkeypatch)
    seen: list[tuple[bool, bool]] = []
    run_product = MatmulOps.run

    def spied(self: MatmulOps, each: Any, out: Any, x: Any, *, decodes: bool) -> None:
        seen.append((decodes, self._strict))
        run_product(self, each, out, x, decodes=decodes)

    monkeypatch.setattr(MatmulOps, "run", spied)
    size: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}
    options = {"compute": "fast", "max_batch": 12, "max_context": 64, "is_strict": is_strict}
    executable = compiled(
        tiny_model(std=0.2, **size),
        "cuda",
        precision=precision_of("bf16"),
        strict_rows=2,
        **options,
    )
    assert executable.capabilities.invariant_rows == (0 if is_strict else 2)
    assert bool(executable.capabilities.passes) != is_strict
    for count, expected in ((1, True), (2, True), (5, is_strict)):
        seen.clear()
        sampling = SamplingParams(max_tokens=2)
        EngineLoop(executable).generate(
            [RequestState(number, (1, 2, 3 + number), sampling) for number in range(count)]
        )
        assert set(seen) == {(False, expected), (True, expected)}, count


@pytest.mark.parametrize("precision", ["bf16", "all-bfp8", "performance", "all-q40", "all-fp8"])
@pytest.mark.parametrize(
    "slots",
    [
        *(pytest.param(each, marks=pytest.mark.gpu(memory_gb=14)) for each in ("16", "24")),
        *(pytest.param(each, marks=pytest.mark.gpu(memory_gb=56)) for each in ("256", "256/16")),
    ],
)
def test_a_request_s_bits_do_not_depend_on_its_cuts_or_its_company(
    precision: str, slots: str
) -> None:
    run("strict_steps", "llama-3.2-1b", precision, slots)


@pytest.mark.gpu(memory_gb=14)
def test_a_row_of_the_library_s_products_has_the_same_bits_among_any_number() -> None:
    run("strict_products")


def run(module: str, *words: str) -> None:
    argv = [*PYTHON, "-m", f"tests.targets.cuda.{module}", *words]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path}
    found = subprocess.run(argv, capture_output=True, text=True, timeout=600, env=env)
    assert found.returncode == 0, found.stdout + found.stderr
