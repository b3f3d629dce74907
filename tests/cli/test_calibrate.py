"""``tilewright calibrate`` and the folders that it writes, on tiny models."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import prefill, random_tokens
from tilewright.cli.main import main
from tilewright.compiler.calibration import norm_tuning
from tilewright.compiler.calibration.forward import sequences
from tilewright.compiler.driver import compile_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.evaluate.tracing.logits import observe
from tilewright.models import LoadedModel, calibrated_precision, load_model
from tilewright.models.checkpoints.calibrated.manifest import MANIFEST, PARTIAL, read_manifest
from tilewright.models.checkpoints.gguf.header import header_of

SHORT = ("--tokens", "2048", "--length", "64")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"word {n * n} of {n}" for n in range(400)))
    return path


@pytest.fixture
def calibrated(
    tiny_gguf: Path, text: Path, tmp_path: Path, run: Callable[..., str]
) -> Callable[..., Path]:
    def make(*options: str, name: str = "calibrated", path: Path = tiny_gguf) -> Path:
        folder = tmp_path / name
        said = run("calibrate", path, "-o", folder, "--text", text, *SHORT, *options)
        assert ", peak memory " in said
        return folder

    return make


def logits(model: LoadedModel, precision: str, target: str = "reference") -> torch.Tensor:
    compute = "fast" if target == "n150" else "exact"
    options = CompileOptions(max_context=64, compute=compute, num_threads=1)
    compiled = compile_model(model, load_precision(precision), target=target, options=options)
    return prefill(compiled.executable, random_tokens(20, vocab_size=200))


@pytest.mark.parametrize("precision", ["performance", "all-bfp4", "all-q40"])
def test_calibrate_writes_codes_that_every_target_has(
    precision: str, calibrated: Callable[..., Path], tiny_gguf: Path
) -> None:
    folder = calibrated("--precision", precision)
    found, original = load_model(folder), load_model(tiny_gguf)
    assert calibrated_precision(folder) == precision and found.name == original.name
    facts = read_manifest(folder).facts
    assert (facts.method, facts.original) == ("gptq", original.checkpoint.content_hash())
    assert facts.num_tokens == 2048 and found.tokenizer.encode("a b") == [
        *original.tokenizer.encode("a b")
    ]
    name = "model.layers.0.mlp.gate_proj.weight"
    values, dense = found.checkpoint.get(name), original.checkpoint.get(name)
    format_ = get_format("q40" if precision == "all-q40" else "bfp4")
    assert not torch.equal(values, format_.round_trip(dense))
    assert torch.equal(found.checkpoint.get(name, slice(3, 7)), values[3:7])
    if precision != "all-q40":
        assert torch.equal(format_.round_trip(values), values)
    reference = logits(found, precision)
    floats = logits(found, "reference")
    assert torch.allclose(reference, floats, atol=2e-2), "the codes are those of the folder"
    assert torch.allclose(logits(found, precision, "cpu"), reference, atol=2e-2)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_calibrate_writes_4_bit_float_codes(
    name: str, calibrated: Callable[..., Path], tiny_gguf: Path, tmp_path: Path
) -> None:
    groups = ", ".join(f"{group}: {name}" for group in ("ff1_3", "ff2", "wqkv", "wo"))
    path = tmp_path / "codes.yaml"
    path.write_text(f"precision: {{{groups}}}")
    folder = calibrated("--precision", str(path))
    found, original = load_model(folder), load_model(tiny_gguf)
    weight, format_ = "model.layers.0.mlp.gate_proj.weight", get_format(name)
    values, dense = found.checkpoint.get(weight), original.checkpoint.get(weight)
    assert not torch.equal(values, format_.round_trip(dense))
    precision = str(calibrated_precision(folder))
    reference, floats = logits(found, precision), logits(found, "reference")
    assert torch.allclose(reference, floats, atol=2e-2), "the codes are those of the folder"
    assert torch.allclose(logits(found, precision, "cpu"), reference, atol=2e-2)


def test_calibrated_weights_are_refused_in_another_format_or_axis(
    calibrated: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = calibrated("--precision", "all-bfp4")

    def refusal(*options: str) -> str:
        assert main(["run", str(folder), "--prompt", "a", *options]) == 2
        return capfd.readouterr().err.splitlines()[-1]

    assert "bfp8, but the weights are calibrated for bfp4" in refusal("--precision", "all-bfp8")
    other = tmp_path / "out.yaml"
    other.write_text("inherits: all-bfp4\nblock_axis: out\n")
    said = refusal("--precision", str(other))
    assert "blocks along out, but the weights are calibrated for blocks along in" in said
    assert "--block-axis out" in said


def test_calibrate_along_out_for_a_board(
    calibrated: Callable[..., Path], board_folder: Path, run: Callable[..., str]
) -> None:
    along_out = calibrated("--block-axis", "out", name="out", path=board_folder)
    found = load_model(along_out)
    name = "model.layers.0.mlp.gate_proj.weight"
    values = found.checkpoint.get(name)
    assert torch.equal(get_format("bfp4").round_trip(values, axis=0), values)
    assert torch.equal(found.checkpoint.get(name, slice(3, 7)), values[3:7])
    precision = calibrated_precision(along_out)
    assert precision is not None and precision.endswith("block_axis = out")
    on_board = logits(found, precision, "n150")
    assert torch.allclose(on_board, logits(found, precision), atol=0.5)
    along_in = calibrated(name="in", path=board_folder)
    assert main(["run", str(along_in), "--target", "n150", "--prompt", "a"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--text", "{empty}"), "is empty; allowed: a text"),
        (("--text", "{tiny}"), "the calibration text has"),
        (("--text", "{missing}"), "No such file"),
        (("--text", "{binary}"), "not valid UTF-8"),
        (("--precision", "stored"), "has no weight in blocks"),
        (("--precision", "auto"), "allowed: a configuration with formats"),
        (("--fast", "--method", "gptq"), "--fast and --method gptq; allowed: one"),
        (("--method", "rtn", "--text", "{tiny}"), "--text with --method rtn"),
        (("--method", "rtn", "--tune-norms"), "--tune-norms without a text"),
    ],
)
def test_calibrate_refuses_bad_input_and_writes_nothing(
    options: tuple[str, ...],
    said: str,
    tiny_gguf: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    files = {"empty": b" \n", "tiny": b"a few words", "binary": b"\xff\xfe\x00"}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    files["missing"] = b""
    words = [o.format(**{name: tmp_path / name for name in files}) for o in options]
    folder = tmp_path / "new"
    assert main(["calibrate", str(tiny_gguf), "-o", str(folder), *SHORT, *words]) == 2
    assert said in capfd.readouterr().err
    assert not (folder / MANIFEST).exists() and not list(tmp_path.glob("new/*.safetensors"))


def test_a_text_of_another_tokenizer_is_plain_text(
    calibrated: Callable[..., Path], text: Path
) -> None:
    """Another model's special tokens and unknown characters are text, and NUL is no end."""
    foreign = "<|start_header_id|>user<|eot_id|> [INST] <unk></s> \u6f22\U0001f9ee\0 word "
    text.write_text(foreign * 200)
    folder = calibrated()
    found = load_model(folder)
    special = {"<|start_header_id|>", "<|eot_id|>", "[INST]"}
    assert len(found.tokenizer.encode("".join(special))) > len(special)
    assert read_manifest(folder).facts.num_tokens == 2048
    for name in ("gate_proj", "up_proj"):
        assert bool(found.checkpoint.get(f"model.layers.0.mlp.{name}.weight").isfinite().all())


def test_calibrate_killed_goes_on_and_gives_the_same_weights(
    calibrated: Callable[..., Path], tiny_gguf: Path, text: Path, tmp_path: Path
) -> None:
    whole, folder = calibrated(), tmp_path / "killed"
    argv = ["calibrate", str(tiny_gguf), "-o", str(folder), "--text", str(text), *SHORT]
    command = [sys.executable, "-m", "tilewright.cli.main", *argv]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        while not (folder / "layer-00000.safetensors").exists() and child.poll() is None:
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
    if not (folder / MANIFEST).exists():
        assert (folder / PARTIAL).exists()
        assert main(["run", str(folder), "--prompt", "a"]) == 2
        assert main([*argv, "--fast"]) == 2, "settings differ"
        assert main(argv) == 0
    for path in whole.glob("*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert json.loads((folder / MANIFEST).read_text()) == json.loads((whole / MANIFEST).read_text())


def test_an_unreached_expert_is_rounded_to_nearest(tmp_path: Path) -> None:
    from tests.tiny import tiny_model
    from tilewright.compiler.calibration.calibrate import CodedMatrix, Method, calibrate, prepare
    from tilewright.compiler.driver import resolve_precision

    model = tiny_model(
        model_type="qwen3_moe", num_experts=6, experts_per_token=1, expert_size=32, std=0.3
    )
    written: list[CodedMatrix] = []

    class Writer:
        def has(self, segment: str) -> bool:
            return False

        def write(self, segment: str, matrices: object, floats: object) -> None:
            written.extend(matrices)  # type: ignore[arg-type, call-overload]

    tokens = torch.full((2, 8), 5)
    notes = calibrate(
        model,
        prepare(model, resolve_precision(model, load_precision("all-bfp4")), lambda *_: None),
        tokens,
        Writer(),
        method=Method(),
        device=torch.device("cpu"),
        progress=lambda *_: None,
    )
    assert notes and all("no token of the text; rounded to nearest" in note for note in notes)
    assert {m.name for m in written} >= {"model.layers.0.mlp.experts.3.gate_proj.weight"}


def test_bench_compares_calibrated_weights_with_their_original(
    calibrated: Callable[..., Path],
    tiny_gguf: Path,
    tmp_path: Path,
    run: Callable[..., str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = calibrated("--precision", "all-bfp4", "--fast")
    case = ("--case", "performance-top-1", "--no-results", "--no-cache", "--json")
    assert main(["bench", str(folder), *case]) == 2
    assert "allowed: with --reference PATH" in capfd.readouterr().err
    assert main(["trace", str(folder)]) == 2
    assert "allowed: with --reference ORIGINAL" in capfd.readouterr().err
    assert main(["trace", str(folder), "--reference", "smollm2"]) == 2
    assert "num_layers 30 of the reference; allowed by" in capfd.readouterr().err
    nearest = json.loads(run("bench", tiny_gguf, *case, "--precision", "all-bfp4"))
    found = json.loads(run("bench", folder, *case, "--reference", tiny_gguf))
    assert found["accuracy"]["reference_id"] == nearest["accuracy"]["reference_id"]
    assert found["accuracy"]["paired"]["base"] == "round to nearest"
    assert found["calibration"].startswith("imatrix, 2,048 tokens (")
    assert (nearest["calibration"], nearest["model_hash"]) == ("", found["model_hash"])
    compiled = tmp_path / "compiled"
    run("compile", folder, "-o", compiled)
    assert main(["bench", str(compiled), *case[:-2], "--json"]) == 2
    assert "allowed: with --reference PATH" in capfd.readouterr().err
    other = calibrated(name="other")
    assert main(["bench", str(folder), *case, "--reference", str(other)]) == 2
    assert "not the checkpoint that" in capfd.readouterr().err


def in_parts(path: Path, folder: Path) -> Path:
    """Write a GGUF file again in parts, aligned to 64 bytes; return the first part."""
    import gguf

    folder.mkdir()
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=9)
    writer.add_custom_alignment(64)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kind, sub_type = field.types[0], field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), kind, sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(folder.iterdir())


@pytest.mark.parametrize("splits", [False, True])
def test_calibrated_q40_codes_reach_gguf_and_dllama_unchanged(
    splits: bool,
    calibrated: Callable[..., Path],
    tiny_gguf: Path,
    tmp_path: Path,
    run: Callable[..., str],
) -> None:
    original = in_parts(tiny_gguf, tmp_path / "parts") if splits else tiny_gguf
    folder = calibrated("--precision", "all-q40", path=original)
    found = load_model(folder).checkpoint
    gguf, dllama = tmp_path / "gguf", tmp_path / "dllama"
    run("convert", folder, "--to", "gguf", "--original", original, "-o", gguf)
    run("convert", folder, "-o", dllama)
    repacked = 0
    for path in (gguf, dllama):
        written = load_model(path).checkpoint
        for name in found.names:
            if "proj" in name:
                values = found.get(name)
                assert torch.equal(written.get(name), values), name
                assert written.stored_type(name) == "Q4_0"
                repacked += not torch.equal(get_format("q40").round_trip(values), values)
    assert repacked, "packing the values again would lose codes"
    if splits:
        (path,) = gguf.iterdir()
        metadata = header_of(path).metadata
        assert metadata["general.file_type"] == 2, "mostly Q4_0"
        assert "split.count" not in metadata
    chat = "a tiny text"
    assert load_model(gguf).tokenizer.encode(chat) == load_model(folder).tokenizer.encode(chat)


def test_calibrate_tied_head_in_equal_codes_stays_tied(
    calibrated: Callable[..., Path],
    tiny_gguf: Path,
    tmp_path: Path,
    run: Callable[..., str],
) -> None:
    original, gguf = in_parts(tiny_gguf, tmp_path / "parts"), tmp_path / "gguf"
    folder = calibrated("--precision", "q50-head-q80", path=original)
    run("convert", folder, "--to", "gguf", "--original", original, "-o", gguf)
    found, written = load_model(folder), load_model(gguf).checkpoint
    assert load_model(original).config.tie_embeddings and found.config.tie_embeddings
    types = {name: found.checkpoint.stored_type(name) for name in found.checkpoint.names}
    assert "lm_head.weight" not in types and types["model.embed_tokens.weight"] == "Q8_0"
    assert {types[name] for name in types if "proj" in name} == {"Q5_0"}
    assert {name: written.stored_type(name) for name in written.names} == types
    (path,) = gguf.iterdir()
    assert header_of(path).metadata["general.file_type"] == 8, "mostly Q5_0"
    exact = logits(found, "q50-head-q80")
    assert torch.allclose(logits(found, "q50-head-q80", "cpu"), exact, atol=2e-2)


@pytest.mark.parametrize("kind", ["binary", "gguf"])
def test_imatrix_of_llama_cpp_gives_the_importance(
    kind: str, tiny_gguf: Path, tmp_path: Path, run: Callable[..., str]
) -> None:
    import struct

    import gguf
    import numpy as np

    path, name = tmp_path / "imatrix", "blk.0.ffn_gate.weight"
    size = load_model(tiny_gguf).config.hidden_size
    squares = np.linspace(0.01, 100, size, dtype=np.float32)
    if kind == "binary":
        head = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 4, size)
        path.write_bytes(head + (squares * 4).tobytes())
    else:
        writer = gguf.GGUFWriter(path, "imatrix")
        writer.add_tensor(f"{name}.in_sum2", squares[None] * 4)
        writer.add_tensor(f"{name}.counts", np.array([[4]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    folder = tmp_path / "new"
    run("calibrate", tiny_gguf, "-o", folder, "--imatrix", path)
    gate, up = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up"))
    found, original = load_model(folder).checkpoint, load_model(tiny_gguf).checkpoint
    bfp4 = get_format("bfp4")
    importance = torch.from_numpy(squares)

    def loss(values: torch.Tensor) -> float:
        return float(((values - original.get(gate)).square() * importance).sum())

    assert loss(found.get(gate)) < loss(bfp4.round_trip(original.get(gate)))
    assert torch.equal(found.get(up), bfp4.round_trip(original.get(up))), "not in the file"
    path.write_bytes(path.read_bytes()[:60])
    assert (
        main(["calibrate", str(tiny_gguf), "-o", str(tmp_path / "b"), "--imatrix", str(path)]) == 2
    )


def test_imatrix_of_another_model_is_refused_by_name(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import struct

    name, size = "blk.0.ffn_gate.weight", load_model(tiny_gguf).config.hidden_size
    path = tmp_path / "imatrix"
    head = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 1, size * 2)
    path.write_bytes(head + struct.pack("<f", 1.0) * size * 2)
    argv = ["calibrate", str(tiny_gguf), "-o", str(tmp_path / "new"), "--imatrix", str(path)]
    assert main(argv) == 2
    said = capfd.readouterr().err
    assert f"gate_proj.weight: importance of {size * 2} inputs; allowed: {size}" in said
    assert not (tmp_path / "new" / MANIFEST).exists()


def test_calibrate_on_a_full_disk_says_so_and_goes_on_later(
    tiny_gguf: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tilewright.models.checkpoints.calibrated import writer

    argv = ["calibrate", str(tiny_gguf), "-o", str(tmp_path / "new"), "--text", str(text), *SHORT]
    save, count = writer.save_file, [0]

    def full(*arguments: object, **named: object) -> None:
        count[0] += 1
        if count[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "save_file", full)
    assert main(argv) == 2
    assert "cannot be written (No space left on device)" in capfd.readouterr().err
    assert not list((tmp_path / "new").glob("*.writing"))
    assert main(argv) == 0


def test_moments_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    from tests.tiny import tiny_model
    from tilewright.compiler.calibration.calibrate import Method, calibrate, prepare
    from tilewright.compiler.driver import resolve_precision
    from tilewright.errors import CompileError

    model = tiny_model(std=0.3)
    weight = model.checkpoint.tensors["model.layers.0.post_attention_layernorm.weight"]
    weight[0] = 1e30

    class Writer:
        def has(self, segment: str) -> bool:
            return False

        def write(self, segment: str, matrices: object, floats: object) -> None:
            list(matrices)  # type: ignore[call-overload]

    precision = resolve_precision(model, load_precision("all-bfp4"))
    prepared = prepare(model, precision, lambda *_: None)
    for name in ("gptq", "imatrix"):
        with pytest.raises(CompileError, match="NaN or infinite"):
            calibrate(
                model,
                prepared,
                torch.full((2, 8), 5),
                Writer(),
                method=Method(name),
                device=torch.device("cpu"),
                progress=lambda *_: None,
            )


def test_calibrate_reuses_codes_of_equal_formats(
    calibrated: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mixed = tmp_path / "mixed.yaml"
    mixed.write_text("inherits: all-bfp4\nlayers: {0: {ff2: q40, wo: bfp8}}\n")
    whole = calibrated("--precision", str(mixed), name="whole")
    donors = [calibrated("--precision", p, name=p) for p in ("all-bfp4", "all-q40", "all-bfp8")]
    forward = "tilewright.compiler.calibration.calibrate.LayeredForward.step"
    monkeypatch.setattr(forward, lambda *_, **__: pytest.fail("every code is known"))
    names = [str(donor) for donor in donors]
    copied = calibrated("--precision", str(mixed), "--reuse", *names, name="copied")
    for path in whole.glob("*.safetensors"):
        assert path.read_bytes() == (copied / path.name).read_bytes()
    fast = ("--fast", "--precision", str(mixed), "--reuse", *names)
    with pytest.raises(AssertionError):
        calibrated(*fast, name="fast")
    assert "all-bfp4: different method, settings; allowed: a folder" in capfd.readouterr().err
    assert not (tmp_path / "fast").exists()


def test_tuned_norms_lower_the_divergence_and_change_norms_only(
    calibrated: Callable[..., Path], tiny_gguf: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm_tuning, "STEP_TOKENS", 256)  # more steps on a short text
    before = calibrated("--precision", "all-bfp4", name="before")
    after = calibrated(
        "--precision", "all-bfp4", "--tune-norms", "--reuse", str(before), name="after"
    )
    assert read_manifest(after).facts.text_line.startswith("gptq and norms, ")
    plain, tuned, original = load_model(before), load_model(after), load_model(tiny_gguf)
    for name in plain.checkpoint.names:
        is_equal = torch.equal(plain.checkpoint.get(name), tuned.checkpoint.get(name))
        assert is_equal == ("norm" not in name), name
    tokens = sequences(original.tokenizer.encode(text.read_text("utf-8")), 64, 2048)
    wanted = observe(original, "reference", tokens)
    kl = [observe(m, "all-bfp4", tokens, against=wanted).kl.mean() for m in (plain, tuned)]
    assert float(kl[1]) < 0.98 * float(kl[0])


def test_tuning_of_norms_goes_on_after_a_fault(
    calibrated: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = calibrated("--tune-norms", name="whole")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(norm_tuning, "tune_norms", fail)
        with pytest.raises((KeyboardInterrupt, SystemExit, AssertionError)):
            calibrated("--tune-norms")
    folder = whole.parent / "calibrated"
    assert (folder / PARTIAL).exists()
    assert read_manifest(folder).facts.text_line.startswith("gptq, ")  # usable, without norms
    calibrated("--tune-norms")
    assert not (folder / PARTIAL).exists()
    for path in whole.glob("*.safetensors"):
        assert (folder / path.name).read_bytes() == path.read_bytes(), path.name
    assert (folder / MANIFEST).read_bytes() == (whole / MANIFEST).read_bytes()
