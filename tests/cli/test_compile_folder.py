"""Folders that ``tilewright compile`` wrote: what they have decided, and damaged ones."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.conftest import Refused, Run
from tilewright.compiler.artifacts.manifest import FORMAT

COMMANDS = ("--prompt", "hello", "--max-generated-tokens", "5", "--no-stop-at-eos")


@pytest.fixture
def compiled(run: Run, checkpoint: Path, tmp_path: Path) -> Path:
    asked = ("--precision", "bf16", "--backend", "onnxruntime")
    run("compile", checkpoint, "-o", tmp_path / "out", *asked)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("option", "value"),
    [("--precision", "bf16"), ("--target", "cpu"), ("--compute", "exact"), ("--dump", "dump")],
)
def test_choices_that_a_folder_has_made(
    option: str, value: str, refused: Refused, compiled: Path
) -> None:
    message = refused("--model", str(compiled), *COMMANDS, option, value)
    assert message.startswith(f"{option} with the compiled folder {compiled}")
    assert not Path("dump").exists()


def test_a_compiled_folder_is_not_compiled(
    refused: Refused, compiled: Path, tmp_path: Path
) -> None:
    message = refused(str(compiled), "-o", str(tmp_path / "more"), verb="compile")
    assert "is compiled already; allowed: a checkpoint" in message


@pytest.mark.parametrize("name", ["model.onnx", "weights.bin", "graph.json"])
def test_a_damaged_folder_is_refused(name: str, refused: Refused, compiled: Path) -> None:
    data = bytearray((compiled / name).read_bytes())
    data[len(data) // 3] ^= 1
    (compiled / name).write_bytes(data)
    message = refused("--model", str(compiled), *COMMANDS)
    assert message == (
        f"{compiled / name}: not the file that was compiled (its hash differs); compile again"
    )
    (compiled / name).unlink()
    assert "cannot be read (No such file" in refused("--model", str(compiled), *COMMANDS)


@pytest.mark.parametrize("name", ["planted", "tokenizer/chat_template.jinja", "a\nb"])
def test_a_file_that_was_added_is_refused(name: str, refused: Refused, compiled: Path) -> None:
    (compiled / name).write_text("PLANTED")
    message = refused("--model", str(compiled), *COMMANDS)
    assert "which is no file that was compiled" in message


def test_manifests_that_are_none(refused: Refused, compiled: Path) -> None:
    path = compiled / "manifest.json"
    whole = json.loads(path.read_text())
    for text, message in (
        ("", "not a manifest"),
        ("[]", "not a manifest"),
        ("[" * 100_000, "not a manifest"),
        ('{"format": 1}', "missing required field"),
        (json.dumps({**whole, "format": FORMAT + 1}), f"format {FORMAT + 1}; allowed: {FORMAT}"),
        (json.dumps({**whole, "files": {"../x": whole["files"]["model.onnx"]}}), "inside the"),
        (json.dumps({**whole, "files": {"/etc/x": whole["files"]["model.onnx"]}}), "inside the"),
        (json.dumps({**whole, "files": {}}), "which is no file that was compiled"),
        (json.dumps({**whole, "target": "gpu"}), "unknown target 'gpu'"),
        (json.dumps({**whole, "compute": "quick"}), "compute 'quick'"),
    ):
        path.write_text(text)
        assert message in refused("--model", str(compiled), *COMMANDS), text[:40]


def test_a_program_that_is_none_is_refused(
    refused: Refused, compiled: Path, tmp_path: Path
) -> None:
    """Hashes that agree do not make a program of a file."""
    manifest = json.loads((compiled / "manifest.json").read_text())
    for data in (b"", b"no model", b"\x08\x0a" * 100):
        (compiled / "model.onnx").write_bytes(data)
        facts = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        manifest["files"]["model.onnx"] = facts
        (compiled / "manifest.json").write_text(json.dumps(manifest))
        assert "not a program of the cpu target" in refused("--model", str(compiled), *COMMANDS)


def test_a_folder_without_its_tokenizer(refused: Refused, compiled: Path) -> None:
    shutil.rmtree(compiled / "tokenizer")
    assert "tokenizer" in refused("--model", str(compiled), *COMMANDS)
