"""``tilewright convert``: dllama's two files, and programs in the compiled cache."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import gguf_models
from tests.cli.conftest import Refused
from tests.models.conftest import add_tokenizer
from tests.models.test_experts_dllama import model_of
from tests.tiny import prefill, random_tokens
from tests.twins import twin_of
from tilewright.cli.main import main
from tilewright.compiler.driver import compile_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.models import load_model
from tilewright.models.checkpoints.dllama import writer as dllama_writer

SCRIPT = Path(__file__).resolve().parents[2] / "demo" / "convert.py"
BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")
MODEL, TOKENIZER = "dllama_model_tiny_{}.m", "dllama_tokenizer_tiny.t"


@pytest.mark.parametrize("weights", ["f32", "q40"])
def test_a_gguf_file_for_dllama(
    weights: str, tiny_gguf: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    folder = tmp_path / "new" / "out"
    said = run("convert", tiny_gguf, "-o", folder, "--weights", weights)
    name = MODEL.format(weights)
    assert sorted(path.name for path in folder.iterdir()) == [name, TOKENIZER]
    precision = {"q40": "stored", "f32": "accuracy"}[weights]
    assert name in said and f"tilewright run {folder} --precision {precision}\n" in said
    source, found = load_model(tiny_gguf), load_model(folder)
    assert found.name == "tiny" and found.checkpoint.path == folder / name
    order = [*range(3, 262), 0, 1, 2]  # special tokens come first there, and last for dllama
    for tensor in source.checkpoint.names:
        values = source.checkpoint.get(tensor)
        is_matrix = values.ndim == 2 and "embed" not in tensor
        if tensor in BY_TOKEN:
            values = values[order]
        if weights == "q40" and is_matrix:
            values = get_format("q40").round_trip(values)
        assert torch.equal(found.checkpoint.get(tensor), values), tensor
    for text in ("hello", "a <think> hell<|im_end|>"):
        ids = [order[index] for index in found.tokenizer.encode(text)]
        assert ids == source.tokenizer.encode(text)
    chat = [{"role": "user", "content": "x"}]
    prompt = source.tokenizer.apply_chat_template(chat)
    assert found.tokenizer.apply_chat_template(chat) == prompt
    assert list((tmp_path / "new").iterdir()) == [folder], "nothing else is left"


def test_a_hugging_face_folder_gives_the_same_logits(
    tiny_folder: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    """Where both have q40 weights, read from the file or made of the folder's floats."""
    ends = {"eos_token": "<|im_end|>", "bos_token": "<|start|>"}
    (tiny_folder / "tokenizer_config.json").write_text(json.dumps(ends))
    out = tmp_path / "out"
    assert MODEL.format("q40") in run("convert", "--model", tiny_folder, "--output", out)
    logits = []
    order = [*range(1, 258), 0, *range(258, 262)]  # rows of no token keep their place
    ids = random_tokens(20, vocab_size=258)
    for path, tokens in ((tiny_folder, ids), (out, [order.index(index) for index in ids])):
        options = CompileOptions(max_batch=1, max_context=32, compute="exact")
        precision = load_precision("dllama")
        compiled = compile_model(load_model(path), precision, target="reference", options=options)
        logits.append(prefill(compiled.executable, tokens))
    assert torch.equal(logits[0][:, order], logits[1]) and logits[0].std() > 0.05


def test_the_cache(
    tiny_gguf: Path, tmp_path: Path, run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run afterwards compiles nothing; from dllama's files as from others."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    run("convert", tiny_gguf, "-o", tmp_path / "out", "--weights", "f32")
    for number, path in enumerate((tiny_gguf, tmp_path / "out"), start=1):
        argv = ("convert", path, "--to", "cache", "--precision", "all-q40")
        argv = (*argv, "--backend", "onnxruntime")
        assert "tiny for cpu, all-q40: in the cache" in run(*argv)
        kept = [entry for entry in (tmp_path / "cache" / "programs").iterdir() if entry.is_dir()]
        assert len(kept) == number
        before = {file: file.stat().st_ino for entry in kept for file in entry.rglob("*")}
        run(*argv)
        assert {f: f.stat().st_ino for e in kept for f in e.rglob("*")} == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--weights", "q80"], "argument --weights: invalid choice: 'q80'"),
        (["--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
        ([], "no folder to write to; allowed: -o DIR"),
        (["-o", "out", "--target", "cpu"], "--target with --to dllama; allowed: without"),
        (["-o", "out", "--precision", "bf16"], "--precision with --to dllama; allowed: without"),
        (["-o", "out", "--dump", "d"], "--dump with convert; allowed: with tilewright compile"),
        (["--to", "cache", "-o", "out"], "--output with --to cache; allowed: without --output"),
        (["--to", "cache", "--weights", "q40"], "--weights with --to cache; allowed: without"),
        (["--to", "cache", "--target", "reference"], "'reference' keeps nothing in the cache"),
        (["--to", "cache", "--precision", "nosuch"], "nosuch"),
        (["-o", "out", "nosuch.gguf", "--model", "x"], "PATH and --model; allowed: one of them"),
        (["-o", "out", "nosuch.gguf"], "nosuch.gguf: no such file"),
        (["-o", "out", "shape:llama-3.1-8b"], "has random weights, and this needs real ones"),
        (["--to", "cache", "shape:llama-3.1-8b"], "has random weights, and this needs real ones"),
        (["-o", "full"], "full: exists and is not empty; allowed: a new or empty folder"),
        (["-o", "full/a"], "full/a: exists and is not empty; allowed: a new or empty folder"),
        (["-o", "~nosuchuser/x"], "~nosuchuser/x: cannot be made"),
    ],
)
def test_what_is_refused(
    argv: list[str],
    words: str,
    tiny_gguf: Path,
    tmp_path: Path,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("mine")
    monkeypatch.chdir(tmp_path)
    named = any(part.startswith(("nosuch.", "shape:")) for part in argv)
    assert words in refused(*argv, *([] if named else [str(tiny_gguf)]), verb="convert")


def test_models_that_dllama_has_no_form_of(
    tiny_folder: Path, tmp_path: Path, refused: Refused
) -> None:
    path = tiny_folder / "config.json"
    path.write_text(path.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 0.001'))
    (tiny_folder / "generation_config.json").write_text('{"eos_token_id": 1}')
    (tiny_folder / "tokenizer_config.json").write_text('{"bos_token": "<|start|>"}')
    said = refused(str(tiny_folder), "-o", str(tmp_path / "out"), verb="convert")
    assert "norm_eps = 0.001 cannot be said in a dllama model; allowed: 1e-05, 1e-06" in said


def test_a_compiled_folder_is_refused(
    tiny_gguf: Path, tmp_path: Path, run: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    run("compile", tiny_gguf, "-o", tmp_path / "compiled", "--target", "reference")
    assert main(["convert", str(tmp_path / "compiled"), "-o", str(tmp_path / "out")]) == 2
    assert "is compiled already; allowed: a checkpoint" in capfd.readouterr().err


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_nothing_half_written_is_left(
    kind: type[BaseException],
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A disk that fills, and a user who has had enough, in the middle of the tensors."""
    rows, count = dllama_writer._packed_rows, 0

    def stop(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count == 9:
            raise OSError(errno.ENOSPC, "No space left on device") if kind is OSError else kind
        return rows(*arguments)

    monkeypatch.setattr(dllama_writer, "_packed_rows", stop)
    code = main(["convert", str(tiny_gguf), "-o", str(tmp_path / "out")])
    assert count == 9 and list(tmp_path.iterdir()) == []
    if kind is OSError:
        (line,) = capfd.readouterr().err.splitlines()
        assert code == 2 and "cannot be written (No space left on device)" in line
    else:
        assert code == 130


def test_a_cache_that_cannot_be_written(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    said = refused(str(tiny_gguf), "--to", "cache", verb="convert")
    assert f"the cache {tmp_path / 'file'} cannot be used" in said


def test_the_script_from_another_folder(tiny_gguf: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_gguf, tmp_path / "tiny.gguf")
    argv = [sys.executable, str(SCRIPT), "tiny.gguf", "-o", "out"]
    found = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tiny.gguf"]
    again = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 2 and again.stdout == ""
    assert len(again.stderr.splitlines()) == 1 and "exists and is not empty" in again.stderr


@pytest.mark.parametrize("kind", ["F32", "Q4_0"])
def test_experts_of_a_gguf_file(kind: str, tmp_path: Path, run: Callable[..., str]) -> None:
    """Stacked there, one by one here; blocks as they are."""
    path = gguf_models.write(model_of(), tmp_path / "tiny.gguf", kind=kind, extra=add_tokenizer)
    said = run("convert", path, "-o", tmp_path / "out")
    assert MODEL.format("q40") in said
    source, found = load_model(path), load_model(tmp_path / "out")
    assert found.config.model_type == "qwen3_moe" and found.config == source.config
    for tensor in source.checkpoint.names:
        values = source.checkpoint.get(tensor)
        is_router = tensor.endswith("mlp.gate.weight")
        if kind == "F32" and values.ndim == 2 and "embed" not in tensor and not is_router:
            values = get_format("q40").round_trip(values)
        if tensor in BY_TOKEN:
            values = values[[*range(3, 262), 0, 1, 2]]
        assert torch.equal(found.checkpoint.get(tensor), values), tensor


def test_experts_of_a_folder(tiny_folder: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    model, folder = model_of(), tmp_path / "moe"
    twin_of(model.config, model.checkpoint.tensors).save_pretrained(folder)
    ends = {"eos_token": "<|im_end|>", "bos_token": "<|start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(ends))
    shutil.copy(tiny_folder / "tokenizer.json", folder)
    (folder / "generation_config.json").unlink()
    run("convert", folder, "-o", tmp_path / "out", "--weights", "f32")
    found = load_model(tmp_path / "out")
    assert (tmp_path / "out" / "dllama_model_moe_f32.m").is_file()
    for name, tensor in model.checkpoint.tensors.items():
        if name in BY_TOKEN:
            tensor = tensor[[*range(1, 258), 0, *range(258, 262)]]
        assert torch.equal(found.checkpoint.get(name), tensor), name
