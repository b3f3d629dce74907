"""What a header alone refuses, before torch is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.errors import CheckpointError
from tilewright.models import ShapeName, check_header, load_model, quantised_types
from tilewright.models.checkpoints.gguf import header as gguf_header

ROOT = Path(__file__).resolve().parents[2]
VERBS = ("run", "chat", "bench", "compile", "convert")


@pytest.fixture
def tiny_gguf(
    tmp_path: Path, make_llama: Callable[..., Any], write_gguf: Callable[..., Path]
) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", make_llama(), "Q4_0")


def test_a_bad_gguf_is_refused_before_torch_is_imported(tiny_gguf: Path) -> None:
    """By every command, in one process: a heavy module that one imports is seen by the next."""
    name, length = b"llama", b"\5\0\0\0\0\0\0\0"
    whole = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(whole.replace(length + name, length + b"whale", 1))
    cut = tiny_gguf.with_name("cut.gguf")
    cut.write_bytes(whole[:100])
    code = f"""
import sys
from tilewright.cli.main import main
heavy = ("torch", "onnxruntime", "tokenizers")
for path in sys.argv[1:3]:
    for verb in {VERBS}:
        argv = [verb, "--model", path]
        argv += ["-o", sys.argv[3]] if verb in ("compile", "convert") else []
        assert main(argv) == 2
        print(verb, [name for name in heavy if name in sys.modules])
"""
    paths = (tiny_gguf, cut, tiny_gguf.with_name("out"))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, paths)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout == "".join(f"{verb} []\n" for verb in VERBS) * 2
    assert done.stderr.count("'whale' is not an architecture") == len(VERBS)
    assert done.stderr.count("cut short or corrupt") == len(VERBS)


def test_whole_files_folders_and_shapes_pass(tiny_gguf: Path, tmp_path: Path) -> None:
    for found in (tiny_gguf, ShapeName("tiny")):
        check_header(found)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    check_header(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("m.gguf", b"GGUF\3\0\0\0", "cut short"),
        ("m.m", b"\xcd\xab\0\x0a", "not a dllama model"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b'{"model_type": "whale"}', "'whale' is not an architecture"),
    ],
)
def test_what_headers_refuse(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        check_header(tmp_path if name == "config.json" else tmp_path / name)


def test_a_header_is_read_once_while_its_file_stays_as_it_was(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, whole = [], gguf_header.read_header

    def counted(data: memoryview, path: Path) -> gguf_header.GGUFHeader:
        read.append(path)
        return whole(data, path)

    monkeypatch.setattr(gguf_header, "read_header", counted)
    for settled_ns, reads in ((1 << 62, 3), (0, 4)):  # a file just written, an old one
        monkeypatch.setattr(gguf_header, "_SETTLED_NS", settled_ns)
        check_header(tiny_gguf)
        assert quantised_types(tiny_gguf) == ("Q4_0",)
        load_model(tiny_gguf)
        assert len(read) == reads
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cut short"):
        check_header(tiny_gguf)
