"""``tilewright compile``: folders that run without the checkpoint, ONNX for others, MLIR."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from tests.cli.conftest import Refused, Run
from tests.ggml_blocks import SHAPES, write_llama
from tests.tiny import prefill
from tilewright.cli.main import main
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cpu.onnxruntime import generate
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import loads
from tilewright.models import load_model
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.vocabulary import Vocabulary, write_folder

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("--prompt", "hello", "--max-generated-tokens", "5", "--no-stop-at-eos")


def result_of(run: Run, *argv: str | Path) -> Result:
    result = loads(run("bench", "--json", "--no-results", *argv))
    assert isinstance(result, Result)
    return result


@pytest.mark.parametrize("target", ["cpu", "reference", "null"])
def test_a_folder_runs_without_its_checkpoint(
    target: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    choices = ("--target", target, "--precision", "all-bfp8")
    first = result_of(run, "--model", checkpoint, *choices, *COMMANDS)
    text = run("bench", "--no-results", "--model", checkpoint, *choices, *COMMANDS).splitlines()[0]
    out = run("compile", checkpoint, "-o", tmp_path / "out", *choices)
    assert "manifest.json" in out and f"tilewright run {tmp_path / 'out'}" in out
    checkpoint.unlink()
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    second = result_of(run, "--model", moved, *COMMANDS)
    for name in ("model", "model_hash", "target", "compute", "heading", "context", "contract"):
        assert getattr(second, name) == getattr(first, name), name
    for name in ("precision_name", "precision_id", "effective_id", "resident_bytes", "cache_bytes"):
        assert getattr(second, name) == getattr(first, name), name
    out = run("bench", "--no-results", "--explain", "--model", moved, *COMMANDS)
    assert text in out.splitlines()
    assert "numeric contract" in out and "one decode step" in out and "all-bfp8" in out


def test_a_folder_measures_accuracy_by_a_reference_in_the_cache(
    run: Run,
    refused: Refused,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    run("compile", checkpoint, "-o", tmp_path / "out", "--precision", "all-bfp8")
    accuracy = ("--token-accuracy", *COMMANDS)
    message = refused("--model", str(tmp_path / "out"), *accuracy)
    assert "a compiled folder has no checkpoint" in message
    whole = result_of(run, "--model", checkpoint, "--precision", "all-bfp8", *accuracy)
    checkpoint.unlink()
    alone = result_of(run, "--model", tmp_path / "out", *accuracy)
    assert alone.accuracy == whole.accuracy and whole.accuracy is not None
    (logits,) = (tmp_path / "cache" / "references").glob("*.npy")
    logits.unlink()
    alone = result_of(run, "--model", tmp_path / "out", *accuracy)
    assert alone.accuracy is not None and alone.accuracy.kl_mean is None
    assert alone.accuracy.num_top1 == whole.accuracy.num_top1


@pytest.mark.parametrize("precision", ["bf16", "all-bfp8", "all-q40"])
def test_onnx_gives_the_same_logits_in_plain_onnxruntime(
    precision: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "onnx"
    run("compile", "--model", checkpoint, "-o", folder, "--emit", "onnx", "--precision", precision)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("generate.py", "model.onnx", "tokenizer", "weights.bin")
    ]
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    caches = {
        each.name: np.zeros((1, each.shape[1], 8, each.shape[3]), dtype=np.float32)
        for each in session.get_inputs()
        if each.name.endswith((".key", ".value"))
    }
    (logits,) = session.run(
        ["logits"],
        {
            "tokens": np.array([tokens]),
            "last_positions": np.array([7], dtype=np.int32),
            "total_length": np.array(8, dtype=np.int32),
            "logit_rows": np.arange(8),
            **caches,
        },
    )
    compiled = compile_model(
        load_model(checkpoint), load_precision(precision), options=CompileOptions(max_context=8)
    )
    assert torch.equal(torch.from_numpy(logits), prefill(compiled.executable, tokens))


@pytest.mark.parametrize("raw", [False, True])
def test_the_example_beside_it_needs_no_tilewright(
    raw: bool, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    """It answers within the chat template, or goes on from the text as it stands."""
    choices = ("--precision", "bf16")
    run("compile", checkpoint, "-o", tmp_path / "onnx", "--emit", "onnx", *choices)
    done = subprocess.run(
        [
            *(sys.executable, "-I", tmp_path / "onnx" / "generate.py", "hello", "--tokens", "9"),
            *(["--raw"] if raw else []),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    model = load_model(checkpoint)
    compiled = compile_model(
        model, load_precision("bf16"), options=CompileOptions(max_context=64, num_threads=1)
    )
    tokenizer = model.tokenizer
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    tokens = tokenizer.encode("hello") if raw else tokenizer.encode(chat, add_special=False)
    assert raw or tokens[-1] in tokenizer.eos_ids, "the template's own token"
    start = len(tokens)
    while len(tokens) < start + 9:
        token = int(prefill(compiled.executable, tokens)[-1].argmax())
        if token in model.tokenizer.eos_ids:
            break
        tokens.append(token)
    assert done.stdout == tokenizer.decode(tokens[start:]) + "\n" != "\n"


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_the_example_makes_the_tokens_that_tilewright_makes(
    add_bos: bool | None, raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a template of everything that templates use, and special tokens added or not."""
    template = (
        "{{ bos_token }}{% for m in messages %}\n  {% if m['role'] == 'system' %}"
        "{{ raise_exception('no') }}{% endif %}\n[{{ m | tojson }}]{% generation %}<think>"
        "{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('%Y') }}"
        "{% if add_generation_prompt and tools is none %}ok{% endif %}\n"
    )
    words = [*["<|start|>", "<think>"], *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(words[:2])
    backend.post_processor = processors.TemplateProcessing("$A <think>", None, [("<think>", 1)])
    vocabulary = Vocabulary(tmp_path, backend, {"bos_token": words[0]}, (0,), template, add_bos)
    write_folder(vocabulary, tmp_path / "tokenizer")
    monkeypatch.setattr(generate, "FOLDER", tmp_path)
    wanted = load_tokenizer(TokenizerSource(tmp_path / "tokenizer"))
    chat = wanted.apply_chat_template([{"role": "user", "content": "Où?"}])
    tokens = (
        wanted.encode("Où?", add_special=True) if raw else wanted.encode(chat, add_special=False)
    )
    assert generate.encode(backend, "Où?", raw=raw) == tokens


@pytest.mark.parametrize("dialect", [(), ("--dialect", "torch", "--length", "16")], ids=str)
def test_mlir_without_weights(
    dialect: tuple[str, ...], run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mlir"
    run("compile", checkpoint, "-o", folder, "--emit", "mlir", *dialect)
    assert sorted(path.name for path in folder.iterdir()) == ["arguments.json", "model.mlir"]
    text = (folder / "model.mlir").read_text(encoding="utf-8")
    assert ("torch.aten" in text) == ("torch" in dialect)
    assert ("linalg.generic" in text) == ("torch" not in dialect)
    assert len(text) < 200_000 < checkpoint.stat().st_size * 2
    described = json.loads((folder / "arguments.json").read_text(encoding="utf-8"))
    names = [argument["name"] for argument in described["arguments"]]
    assert names[:2] == ["tokens", "positions"]
    assert set(names[2:]) == {name for name, _ in load_model(checkpoint).module.named_parameters()}


def test_dumps_show_every_pass(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    onnx = ("--backend", "onnxruntime")
    run("compile", checkpoint, "-o", tmp_path / "out", *onnx, "--dump", tmp_path / "dump" / "it")
    names = sorted(path.name for path in (tmp_path / "dump" / "it").iterdir())
    assert names[0] == "01_canonicalize_graph.txt" and names[-1].endswith("fuse_rope_attention.txt")
    run(
        "bench", "--no-results", "--model", checkpoint, *COMMANDS, *onnx, "--dump", tmp_path / "run"
    )
    again = ("--dump", tmp_path / "again")
    run("bench", "--no-results", "--model", checkpoint, *COMMANDS, *onnx, *again)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == names, "not cached"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--target", "gpu"], "unknown target 'gpu'; allowed: reference, null, cpu"),
        (["--precision", "none-such"], "none-such"),
        (["--emit", "llvm"], "--emit: invalid choice: 'llvm'"),
        (["--emit", "mlir", "--dialect", "tosa"], "dialect 'tosa' is not emitted; allowed: torch"),
        (["--emit", "mlir", "--length", "0"], "--length: '0'; allowed: integers"),
        (["--emit", "mlir", "--precision", "bf16"], "--precision with --emit mlir"),
        (["--emit", "mlir", "--target", "cpu"], "--target with --emit mlir"),
        (
            ["--emit", "onnx", "--target", "reference"],
            "target reference emits no 'onnx'; allowed: program, mlir",
        ),
        (["--dialect", "torch"], "--dialect with --emit program; allowed: --emit mlir"),
        (["--length", "4", "--emit", "onnx"], "--length with --emit onnx"),
        (["--model", "x"], "PATH and --model; allowed: one of them"),
        (["--emit", "mlir", "--length", "5000"], "--length 5000; allowed by this model: 1 to 1536"),
        (["--dump", "~nobody-of-this-name/x"], "not a folder that can be written"),
        (["--users", "2"], "--users with --emit program; allowed: --emit ttnn"),
        (["--emit", "ttnn"], "target cpu emits no 'ttnn'; allowed: program, onnx"),
        (["--emit", "ttnn", "--target", "cpu"], "target cpu emits no 'ttnn'; allowed: "),
        (
            ["--emit", "ttnn", "--target", "n150", "--context", "5000"],
            "--context 5000; allowed by this model: 1 to 1536",
        ),
        (["--emit", "ttnn", "--target", "n150", "--users", "33"], "--users: '33'; allowed"),
        (
            ["--emit", "ttnn", "--target", "n150"],
            "heads of 16, of which 16 turn; allowed in a ttnn file: 32",
        ),
    ],
)
def test_choices_that_do_not_go_together(
    argv: list[str], message: str, refused: Refused, tiny_gguf: Path, tmp_path: Path
) -> None:
    output = str(tmp_path / "new")
    assert message in refused(str(tiny_gguf), "-o", output, *argv, verb="compile")
    assert not (tmp_path / "new").exists()


def test_a_file_for_a_board(run: Run, board_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "board"
    argv = ("--model", board_folder, "--target", "n300", "--context", "256", "--users", "2")
    out = run("compile", *argv, "--emit", "ttnn", "-o", output)
    assert "--run-on-device" in out
    text = (output / "model.py").read_text()
    compile(text, "model.py", "exec")
    assert "mesh 1 x 2 of N300, 2 users of 256 positions" in text
    assert (output / "tokenizer" / "tokenizer.json").is_file()
    assert len(list(output.glob("layer_*.safetensors"))) == 2


def test_outputs_that_cannot_be(
    refused: Refused, tiny_gguf: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    assert "no folder to write to; allowed: -o DIR" in refused(str(tiny_gguf), verb="compile")
    for output in (tiny_folder, tiny_folder / "config.json"):
        message = refused(str(tiny_gguf), "-o", str(output), verb="compile")
        assert "exists and is not empty; allowed: a new or empty folder" in message
    below = str(tiny_folder / "config.json" / "below")
    for output in (below, "~nobody-of-this-name/x", str(tmp_path / ("x" * 300))):
        assert "cannot be made" in refused(str(tiny_gguf), "-o", output, verb="compile")
    assert "no folder to write to" in refused(str(tiny_gguf), "-o", "", verb="compile")


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_disk_that_is_full(
    target: str, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a file, nothing beyond 16 kB can be written meanwhile."""
    argv = ["compile", str(tiny_gguf), "-o", str(tmp_path / "o"), "--target", target]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    try:
        assert main(argv) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (said,) = capfd.readouterr().err.splitlines()
    assert "cannot be written" in said
    assert not (tmp_path / "o").exists()


def test_a_compilation_that_fails_leaves_nothing(
    refused: Refused, tiny_folder: Path, tmp_path: Path
) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    config["hidden_size"] += 2
    (tiny_folder / "config.json").write_text(json.dumps(config))
    refused(str(tiny_folder), "-o", str(tmp_path / "out"), verb="compile")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_an_empty_folder_is_filled(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    run("compile", checkpoint, "-o", tmp_path / "out", "--target", "null")
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_default_keeps_a_quantised_file_as_it_is_and_says_so(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, tiny_gguf: Path
) -> None:
    """And a configuration that quantises again says what becomes what; a line each, on stderr."""
    types = dict.fromkeys(SHAPES, "Q4_1")
    model = str(write_llama(tmp_path / "typed.gguf", types, embedding="Q8_0"))

    def notes(path: str, *argv: str) -> list[str]:
        folder = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        assert main(["compile", path, "-o", folder, "--target", "reference", *argv]) == 0
        lines = capfd.readouterr().err.splitlines()
        return [line for line in lines if line.startswith(("precision auto", "quantised again"))]

    assert notes(model) == ["precision auto: stored, the file's Q4_1, Q8_0"]
    assert notes(model, "--precision", "stored") == []
    assert notes(model, "--precision", "all-bfp4") == [
        "quantised again: Q4_1 → bfp4 (ff1_3, ff2, wo, wqkv); Q8_0 → bf16 (embedding); "
        "Q8_0 → bfp4 (lm_head)"
    ]
    said = "precision auto: accuracy, for the weights are not quantised"
    assert notes(str(tiny_gguf)) == [said]
