"""Strict steps: when the promise is made, and that it is kept on a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.compiler.child import PYTHON
from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda import invariance
from tilewright.compiler.targets.cuda.invariance import MOST_SEATS, can_promise, invariant_of
from tilewright.compiler.targets.cuda.kernels import native

STRICT = CompileOptions(max_batch=MOST_SEATS, is_strict=True)
PLAN: Any = None  # which only `has_mixers` looks at


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> Callable[[CompileOptions], str]:
    """What is promised, on a machine with our own kernels and the workspace withheld."""
    monkeypatch.setattr(native, "why_not", lambda device: "")
    monkeypatch.setattr(invariance, "has_mixers", lambda plan: False)
    for name, value in invariance._WITHHELD.items():
        monkeypatch.setenv(name, value)
    return lambda options: invariant_of(PLAN, options, torch.device("cpu"))


def test_rows_are_promised_where_all_of_it_is_there(
    promised: Callable[[CompileOptions], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert promised(STRICT) == "rows"
    assert promised(replace(STRICT, is_strict=False)) == "none"
    assert promised(replace(STRICT, compute="exact")) == "none"
    assert promised(replace(STRICT, max_batch=MOST_SEATS + 1)) == "none", "the library's products"
    with monkeypatch.context() as patched:
        patched.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
        assert promised(STRICT) == "none", "the library may split sums"
    with monkeypatch.context() as patched:
        patched.setattr(native, "why_not", lambda device: "no compiler")
        assert promised(STRICT) == "none"
    monkeypatch.setattr(invariance, "has_mixers", lambda plan: True)
    assert promised(STRICT) == "none" and not can_promise(PLAN, STRICT), "experts"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "performance"])
def test_a_prompt_s_bits_do_not_depend_on_its_cuts_or_its_company(precision: str) -> None:
    argv = [*PYTHON, "-m", "tests.targets.cuda.strict_steps", "llama-3.2-1b", precision]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
