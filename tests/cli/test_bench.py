"""``tilewright bench`` on a tiny model: what it prints and records, and models it cannot run."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CONTEXT, Refused
from tilewright.cli.main import main
from tilewright.evaluate.results.record import Result, unpack_hits
from tilewright.evaluate.results.result_file import loads, read

FEW = ("--max-generated-tokens", "5", "--repeat-batches", "2")


@pytest.fixture
def run(
    tiny_gguf: Path, results: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Runs a command that must succeed; standard output and error."""

    def succeed(*argv: str) -> tuple[str, str]:
        assert main(["bench", "--model", str(tiny_gguf), "--results", str(results), *argv]) == 0
        return capfd.readouterr()

    return succeed


Run = Callable[..., tuple[str, str]]


def test_a_prompt_gives_text_a_table_and_a_record(run: Run, results: Path) -> None:
    out, _ = run("--prompt", "hello", *FEW, "--no-stop-at-eos", "--backend", "onnxruntime")
    for name in ("TTFT (ms)", "prefill (t/s)", "decode (t/s/u)", "all users (t/s)", "peak memory"):
        assert name in out
    assert "spread" in out, "over two repeats"
    assert "performance-batch-1*: " in out and "tiny on cpu, performance\n" in out
    (result,) = read(results)
    assert result.case == "performance-batch-1*", "changed cases are marked"
    assert (result.target, result.batch, result.num_generated) == ("cpu", 1, 5)
    assert result.prompt_length == len(["hell", "o", "<|im_end|>"])
    assert len(result.repeats) == 2
    assert result.ttft_ms is not None and result.ttft_ms > 0
    assert result.decode_tsu is not None and result.decode_tsu > 0
    assert result.peak_memory_bytes is not None and result.resident_bytes is not None
    assert result.peak_memory_bytes > result.resident_bytes > 0
    assert result.cache_bytes == 2 * 2 * 2 * 16 * 4 * (result.prompt_length + 4)
    assert result.accuracy is None


def test_results_are_appended(run: Run, results: Path) -> None:
    for count in (1, 2, 3):
        run("--case", "performance-device-perf", "--max-generated-tokens", "2")
        assert len(read(results)) == count


def test_an_unchanged_case_has_its_own_name(run: Run, results: Path) -> None:
    run("--case", "performance-device-perf")
    (result,) = read(results)
    assert result.case == "performance-device-perf"
    assert (result.prompt_length, result.num_generated, result.context) == (128, 10, 138)


def test_json_is_one_line_on_standard_output(run: Run, results: Path) -> None:
    out, error = run("--prompt", "hello", *FEW, "--json")
    assert out.count("\n") == 1 and out.endswith("}\n")
    result = loads(out)
    assert isinstance(result, Result)
    assert read(results) == [result]
    assert "TTFT (ms)" in error, "the tables are still there for who looks"


def test_no_results_records_nothing(run: Run, results: Path) -> None:
    out, _ = run("--prompt", "hello", *FEW, "--json", "--no-results")
    assert loads(out).case == "performance-batch-1*"
    assert not results.parent.exists()


def test_explain_prints_the_effective_table(run: Run) -> None:
    heading = (
        "precision_cfg = {ff1_3: bfp4, ff2: bfp8}, fidelity_cfg = {li_ff2: hifi2}, "
        "layer_cfg = {1: {ff2: bf16}}"
    )
    out, _ = run("--prompt", "a", *FEW, "--explain", "--precision", heading)
    assert "numeric contract of the target" in out
    assert "one decode step at a context of" in out
    for word in ("ff1_3", "bfp4", "ff2", "bf16", "honoured", "not honoured", "emulated"):
        assert word in out
    lines = [line for line in out.splitlines() if "ff2" in line]
    assert any("bf16" in line and "1" in line for line in lines), "the layer's own value"
    assert "draft" not in out, "there is no draft layer"


@pytest.mark.parametrize("target", ["reference", "null", "cpu"])
def test_every_target_runs(run: Run, results: Path, target: str) -> None:
    run("--prompt", "hello", "--target", target, "--precision", "all-bfp8", *FEW)
    (result,) = read(results)
    assert result.target.removesuffix("-native") == target
    assert result.heading.startswith("precision_cfg = {ff1_3: bfp8, ")


def outputs(run: Run, *argv: str) -> str:
    """What a run printed before its table."""
    out, _ = run(*argv, "--max-generated-tokens", "30", "--repeat-batches", "1")
    return out.partition("performance-batch-1")[0]


def test_a_text_is_the_same_again_and_another_with_another_seed(run: Run, results: Path) -> None:
    greedy = ("--prompt", "hello", "--no-stop-at-eos")
    sampled = (*greedy, "--temperature", "1.5", "--top-p", "0.95", "--top-k", "200")
    likeliest = ("--temperature", "1.5", "--top-p", "0", "--seed", "5")
    assert outputs(run, *greedy) == outputs(run, *greedy, *likeliest)
    assert outputs(run, *sampled) == outputs(run, *sampled)
    assert outputs(run, *sampled) != outputs(run, *sampled, "--seed", "5")
    said = [result.sampling for result in read(results)]
    assert said == 2 * [""] + 4 * ["temperature 1.5, top-k 200, top-p 0.95"]


def test_exact_compute_of_the_cpu_gives_the_reference_s_text(run: Run) -> None:
    argv = ("--prompt", "hello", "--no-stop-at-eos", "--precision", "all-bfp4")
    assert outputs(run, *argv, "--compute", "exact") == outputs(run, *argv, "--target", "reference")


def test_a_batch_prints_one_line_a_user(run: Run, results: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    prompts = [{"prompt": "one"}, {"prompt": "twelve", "max_tokens": 2}, {"prompt": "three"}]
    file.write_text(json.dumps(prompts))
    out, _ = run("--input-prompts", str(file), *FEW, "--no-stop-at-eos")
    assert all(f"[{user}] " in out for user in range(3))
    assert "first / median / last" in out
    (result,) = read(results)
    assert (result.batch, result.num_generated) == (3, 5)
    assert result.ttft_median_ms is not None


def test_rotated_prompts_keep_their_texts(run: Run) -> None:
    out, _ = run("--case", "performance-eval-repeat", "--batch-size", "5", *FEW)
    assert "every prompt gave the same text at every repeat" in out


def test_texts_that_differ_are_an_exit_code(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tilewright.evaluate.measure import timing

    real, seen = timing.time_once, []

    def unstable(*arguments: Any) -> timing.TimedRun:
        run = real(*arguments)
        seen.append(run)
        return timing.TimedRun(run.repeat, (*run.outputs[1:], (len(seen),)))

    monkeypatch.setattr(timing, "time_once", unstable)
    argv = ["--case", "performance-eval-repeat", "--batch-size", "3", *FEW, "--no-results"]
    assert main(["bench", "--model", str(tiny_gguf), *argv]) == 1
    assert "prompts gave different texts at different repeats" in capfd.readouterr().out


def test_accuracy_is_measured_and_compared_with_the_base(
    run: Run, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    case = ("--case", "performance-token-matching", "--max-generated-tokens", "2")
    for precision in ("reference", "bf16", "all-bfp4"):
        out, _ = run(*case, "--precision", precision, "--compute", "exact")
        assert "top-1" in out and "95 %" in out and "KL to fp32" in out
    exact, base, coarse = (result.accuracy for result in read(results))
    assert exact is not None and base is not None and coarse is not None
    assert (exact.num_positions, exact.num_top1, exact.num_top5) == (512, 512, 512)
    assert exact.kl_mean is not None and exact.kl_mean < 1e-8
    assert exact.paired is None and base.paired is None
    assert coarse.paired is not None and coarse.paired.base == "bf16"
    assert coarse.num_top1 < base.num_top1 <= 512
    assert coarse.paired.b - coarse.paired.c == base.num_top1 - coarse.num_top1
    assert len({each.reference_id for each in (exact, base, coarse)}) == 1


def test_accuracy_on_another_text(
    run: Run, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text has a reference of its own in the cache, and the base's predictions on it."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    case = ("--case", "performance-top-1")
    both = ("bf16", "all-bfp4")
    for argv, precisions in (([], both), (["--accuracy-text", "held-out"], both), ([], both[1:])):
        for precision in precisions:
            out, _ = run(*case, "--precision", precision, *argv)
            assert ("accuracy on" in out and "held-out" in out) == bool(argv)
    found = read(results)
    assert [each.case for each in found] == [
        *["performance-top-1"] * 2,
        *["performance-top-1*"] * 2,
        "performance-top-1",
    ]
    assert {(each.decode_tsu, each.tps, each.num_generated) for each in found} == {(None, None, 1)}
    base, coarse, other_base, other_coarse, again = (each.accuracy for each in found)
    assert base and coarse and other_base and other_coarse
    assert [each.text for each in (base, coarse)] == ["accuracy"] * 2
    assert [each.text for each in (other_base, other_coarse)] == ["held-out"] * 2
    assert base.reference_id == coarse.reference_id != other_base.reference_id
    assert coarse == again, "the first text's reference and predictions were kept"
    for one, other in ((base, coarse), (other_base, other_coarse)):
        assert one.hits is not None and other.hits is not None and other.paired is not None
        pairs = list(zip(unpack_hits(one.hits, 512), unpack_hits(other.hits, 512), strict=True))
        assert other.paired.b == sum(first and not second for first, second in pairs)
        assert other.kl_mean and other.kl_error and 0 < other.kl_error < other.kl_mean
    kept = tmp_path / "cache" / "references"
    assert len(list(kept.glob("*.json"))) == len(list(kept.glob("*.npy"))) == 2


def test_an_accuracy_text_of_too_few_tokens_is_refused_before_anything_runs(
    refused: Refused, tiny_gguf: Path, tmp_path: Path
) -> None:
    (tmp_path / "short.txt").write_text("one two three")
    argv = ["--case", "performance-top-1", "--accuracy-text", str(tmp_path / "short.txt")]
    said = refused("--model", str(tiny_gguf), *argv)
    assert said == "the accuracy text has 13 tokens here; allowed: 1024 or more"


def test_a_folder_is_a_model_too(tiny_folder: Path, results: Path) -> None:
    argv = ["--model", str(tiny_folder), "--prompt", "hello", "--results", str(results)]
    assert main(["bench", *argv, *FEW]) == 0
    (result,) = read(results)
    assert result.prompt_length == 5


def test_peak_memory_is_of_this_process_and_not_of_the_one_that_started_it() -> None:
    """As a sweep or a test runner would; the system's own counter does not begin at zero."""
    ballast = b"x" * 10**9
    module = "tilewright.cli.measure.measure"
    script = f"from {module} import peak_memory_bytes; print(peak_memory_bytes())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert 20e6 < int(done.stdout) < len(ballast)


# Models and requests that cannot be run: found only once the model is opened.

ARGV = ("--prompt", "hello", *FEW)


@pytest.fixture
def damaged(tiny_gguf: Path, tmp_path: Path) -> Callable[[bytes], Path]:
    def write(data: bytes) -> Path:
        path = tmp_path / "damaged.gguf"
        path.write_bytes(data)
        return path

    return write


def test_a_gguf_cut_anywhere_is_refused(
    refused: Refused, tiny_gguf: Path, damaged: Callable[[bytes], Path]
) -> None:
    whole = tiny_gguf.read_bytes()
    for share in (0.0, 1e-5, 1e-4, 0.01, 0.05, 0.2, 0.5, 0.9, 0.99999):
        path = damaged(whole[: int(len(whole) * share)])
        assert str(path) in refused("--model", str(path), *ARGV)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"GGUF", b"GGML", ""),
        (b"GGUF\3", b"GGUF\x63", "99"),
        (b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0whale", "whale"),
        (b"blk.0.attn_q", b"blk.0.attn_x", "attn"),
        (b"llama.block_count", b"llama.block_c\xffunt", ""),
    ],
)
def test_a_corrupt_gguf_is_refused(
    refused: Refused,
    tiny_gguf: Path,
    damaged: Callable[[bytes], Path],
    old: bytes,
    new: bytes,
    message: str,
) -> None:
    whole = tiny_gguf.read_bytes()
    assert old in whole
    path = damaged(whole.replace(old, new, 1))
    said = refused("--model", str(path), *ARGV)
    assert str(path) in said and message in said


def test_an_unknown_quantisation_type_lists_the_known_ones(
    refused: Refused, tiny_gguf: Path, damaged: Callable[[bytes], Path]
) -> None:
    """After a tensor's name stand its rank, its dimensions and its type."""
    whole = bytearray(tiny_gguf.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = whole.index(name) + len(name)
    (rank,) = struct.unpack_from("<I", whole, at)
    struct.pack_into("<I", whole, at + 4 + 8 * rank, 9)  # Q8_1
    said = refused("--model", str(damaged(bytes(whole))), *ARGV)
    assert "Q8_1" in said
    for known in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"):
        assert known in said


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_unknown_architecture_lists_the_known_ones(refused: Refused, tiny_folder: Path) -> None:
    change_config(tiny_folder, model_type="whale", architectures=["WhaleForCausalLM"])
    said = refused("--model", str(tiny_folder), *ARGV)
    assert "whale" in said and "llama" in said


def test_a_damaged_folder_is_refused(refused: Refused, tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    whole = weights.read_bytes()
    for data in (b"", whole[:7], whole[:100], whole[: len(whole) // 2], whole[:-1]):
        weights.write_bytes(data)
        assert str(tiny_folder) in refused("--model", str(tiny_folder), *ARGV)
    header = struct.pack("<Q", 1 << 60) + whole[8:]
    weights.write_bytes(header)
    assert str(weights) in refused("--model", str(tiny_folder), *ARGV)
    weights.unlink()
    assert str(tiny_folder) in refused("--model", str(tiny_folder), *ARGV)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_json_file_is_refused(
    refused: Refused, tiny_folder: Path, name: str, content: bytes
) -> None:
    (tiny_folder / name).write_bytes(content)
    assert name in refused("--model", str(tiny_folder), *ARGV)


def test_tensors_that_do_not_fit_the_configuration(refused: Refused, tiny_folder: Path) -> None:
    change_config(tiny_folder, num_hidden_layers=3)
    assert "model.layers.2." in refused("--model", str(tiny_folder), *ARGV)
    change_config(tiny_folder, num_hidden_layers=2, intermediate_size=128)
    assert "mlp." in refused("--model", str(tiny_folder), *ARGV)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--case", "performance-dp-4"), "needs 4 replicas (data parallel); allowed by this"),
        (("--case", "accuracy-dp-8"), "needs 8 replicas (data parallel); allowed by this"),
        (
            ("--case", "performance-long-context-16k"),
            f"needs a context of 16584 tokens; allowed by this model: {CONTEXT} or fewer",
        ),
        (("--case", "performance-reasoning"), "allowed by this model's context: 1536 together"),
        (("--prompt", "word " * 400), "prompt 1 has 2001 tokens and 200 are to be generated"),
        (("--prompt", "a", "--max-generated-tokens", "1536"), "1536 are to be generated"),
        (
            ("--precision", "precision_cfg = {}, fidelity_cfg = {}, layer_cfg = {2: {ff2: bf16}}"),
            "layers.2: the model has 2 layers; allowed: 0 to 1",
        ),
        (("--precision", "a.yaml"), "a.yaml: layers.0-5: the model has 2 layers; allowed: 0 to 1"),
    ],
)
def test_requests_that_do_not_fit_the_model(
    refused: Refused,
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    argv: tuple[str, ...],
    message: str,
) -> None:
    (tmp_path / "a.yaml").write_text("inherits: bf16\nlayers: {'0-5': {ff2: bfp8}}\n")
    monkeypatch.chdir(tmp_path)
    said = refused("--model", str(tiny_gguf), *argv)
    assert message in said
