"""Every error of a checkpoint reader names the allowed values or an action."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "models"
PASSED_ON = {"tail", "_reason"}
"""Names of texts that begin with ``allowed:``, made by a caller or another function."""


def errors_without(source: str) -> Iterator[int]:
    """Yield the lines of CheckpointErrors without ``allowed:``."""
    tree = ast.parse(source)
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and "allowed:" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "CheckpointError":
            names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            is_named = "allowed:" in ast.unparse(node) or "allowed" in names
            if not is_named and not names & (constants | PASSED_ON):
                yield node.lineno


def test_errors_of_readers_name_the_allowed_values() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(ROOT.rglob("*.py"))
        for line in errors_without(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('CheckpointError("a: is missing")', [1]),
        ('CheckpointError("a: is missing; allowed: b")', []),
        ('CheckpointError(f"a: is missing; {allowed(names)}")', []),
        ('_A = "allowed: b"\nCheckpointError(f"a: is missing; {_A}")', []),
        ('_A = "b"\nCheckpointError(f"a: is missing; {_A}")', [2]),
    ],
)
def test_an_error_without_them_is_found(text: str, lines: list[int]) -> None:
    assert list(errors_without(text)) == lines
