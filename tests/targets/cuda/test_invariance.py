"""Strict steps: when the promise is made, and that it is kept on a GPU."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from tilewright.compiler.child import PYTHON
from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda import invariance
from tilewright.compiler.targets.cuda.invariance import invariant_of
from tilewright.compiler.targets.cuda.kernels import native

STRICT = CompileOptions(max_batch=16, is_strict=True)


@pytest.fixture
def promised(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is promised of options, on a machine whose own kernels take up to 16 rows."""
    monkeypatch.setattr(native, "why_not", lambda device: "")
    monkeypatch.setattr(native, "most_tokens", lambda held: 16)
    monkeypatch.setattr(invariance, "has_mixers", lambda plan: False)
    monkeypatch.setattr(invariance, "_products", lambda plan, weights: [None])
    for name, value in invariance._WITHHELD.items():
        monkeypatch.setenv(name, value)
    nothing: Any = None  # the plan and its weights, which only what is replaced above looks at

    def of(options: CompileOptions) -> str:
        return invariant_of(nothing, nothing, options, torch.device("cpu"))

    return of


def test_rows_are_promised_where_all_of_it_is_there(
    promised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert promised(STRICT) == "rows"
    assert promised(replace(STRICT, is_strict=False)) == "none"
    assert promised(replace(STRICT, compute="exact")) == "none"
    assert promised(replace(STRICT, max_batch=17)) == "none", "the library's product from there on"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2")
    assert promised(STRICT) == "none", "the library may split sums"


def test_nothing_is_promised_of_experts_and_without_our_kernels(
    promised: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(invariance, "has_mixers", lambda plan: True)
        assert promised(STRICT) == "none"
    monkeypatch.setattr(native, "why_not", lambda device: "no compiler")
    assert promised(STRICT) == "none"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "performance"])
def test_a_prompt_s_bits_do_not_depend_on_its_cuts_or_its_company(precision: str) -> None:
    argv = [*PYTHON, "-m", "tests.targets.cuda.strict_steps", "llama-3.2-1b", precision]
    found = subprocess.run(argv, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
