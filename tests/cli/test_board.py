"""``tilewright bench`` on boards that are not here: emulated, predicted, never called measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tilewright.cli.main import main
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.results.result_file import loads, read

FEW = ("--max-generated-tokens", "3")
Run = Callable[..., str]


@pytest.fixture
def run(tiny_gguf: Path, results: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command on n150 that must succeed; its standard output."""

    def succeed(*argv: str, target: str = "n150") -> str:
        model = () if "--model" in argv else ("--model", str(tiny_gguf))
        where = ("--target", target, "--results", str(results))
        assert main(["bench", *model, *where, *argv]) == 0
        return str(capfd.readouterr().out)

    return succeed


def test_a_prompt_is_answered_and_its_speed_predicted(run: Run, results: Path) -> None:
    out = run("--prompt", "hello", *FEW)
    assert "decode (t/s/u), predicted" in out and "TTFT (ms), predicted" in out
    assert "peak memory" not in out, "of this machine, not of the board"
    (result,) = read(results)
    assert (result.kind, result.target, result.device) == ("predicted", "n150", "N150")
    assert result.repeats == () and result.peak_memory_bytes is None
    assert result.decode_tsu and result.decode_tsu > 100, "a tiny model"
    assert result.decode_error is None and "extrapolated" in out, "far below what was fitted"


def test_text_and_prediction_differ_with_nothing_but_the_board(run: Run, results: Path) -> None:
    for target in ("n150", "n300"):
        run("--prompt", "hello", *FEW, target=target)
    one, other = read(results)
    assert (one.mesh, other.mesh) == ("1x1", "1x2")
    assert one.decode_tsu != other.decode_tsu
    assert one.effective_id == other.effective_id


def test_accuracy_is_emulated_and_stands_apart_from_speed(
    run: Run, results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    out = run("--case", "performance-top-1", "--precision", "bf16", "--json")
    (result,) = read(results)
    assert loads(out) == result
    assert result.kind == "emulated" and result.decode_tsu is None
    accuracy = result.accuracy
    assert accuracy is not None and accuracy.num_positions == 512
    assert 0.9 * 512 < accuracy.num_top1 < 512, "bf16 on a board is near fp32 and is not fp32"


def test_where_the_time_goes(run: Run, refused: Refused, tiny_gguf: Path) -> None:
    out = run("--case", "performance-device-perf", "--explain-time", "--explain")
    assert "Matmul" in out and "once a step" in out and "in bfp4" in out
    with_cpu = ("--model", str(tiny_gguf), "--prompt", "a", "--explain-time")
    assert "allowed: --target n150, n300, t3k, tg, p100" in refused(*with_cpu)


def test_programs_are_dumped_as_text(run: Run, tmp_path: Path) -> None:
    run("--case", "performance-device-perf", "--dump", str(tmp_path / "dump"))
    text = (tmp_path / "dump" / "program_decode.txt").read_text()
    assert text.startswith("decode on N150 1x1: batch 1") and "= matmul(" in text
    assert (tmp_path / "dump" / "program_prefill.txt").is_file()


def test_every_figure_is_a_line_of_json(run: Run) -> None:
    out = run("--prompt", "hello", *FEW, "--json")
    assert [loads(line).kind for line in out.splitlines()] == ["predicted"]


@pytest.mark.slow
def test_a_shape_s_speed_needs_no_weights(run: Run, results: Path) -> None:
    model = ("--model", "shape:llama-3.1-70b", "--case", "performance-ci-1")
    out = run(*model, target="t3k")
    assert "random weights" in out
    (result,) = read(results)
    assert (result.weights, result.mesh) == ("random", "1x8")
    assert result.decode_tsu is not None and 10 < result.decode_tsu < 25, "16.3 was published"
    assert result.decode_error and 0 < result.decode_error < 0.3 and result.ttft_error
    assert "numeric contract" in run(*model, "--explain", target="t3k")


@pytest.mark.parametrize(
    ("shape", "case"),
    [
        ("llama-3.2-1b", ("performance-long-context-64k", "--batch-size", "32")),
        pytest.param("llama-3.1-70b", ("performance-ci-1",), marks=pytest.mark.slow),
    ],
    ids=["caches", "weights"],
)
def test_what_does_not_fit_is_said_with_bytes(
    refused: Refused, shape: str, case: tuple[str, ...]
) -> None:
    message = refused("--model", f"shape:{shape}", "--case", *case, "--target", "n150")
    assert "GB a chip of N150" in message and "a larger mesh (t3k" in message


def test_groups_of_chips_share_a_box(run: Run, results: Path, refused: Refused) -> None:
    case = ("--model", "shape:llama-3.2-1b", "--case", "performance-dp-4")
    run(*case, target="t3k")
    (result,) = read(results)
    assert (result.dp, result.mesh) == (4, "1x2")
    assert result.resident_bytes is not None and result.resident_bytes > 4 * 1e9
    assert "data-parallel groups" in refused(*case, "--target", "n300")
    argv = (*case, "--target", "t3k", "--prompt", "a")
    assert "one group is emulated; allowed: its prediction" in refused(*argv)


def test_what_a_board_has_not_is_refused(refused: Refused, tiny_gguf: Path) -> None:
    model = ("--model", str(tiny_gguf), "--prompt", "a", "--target", "n150")
    assert "embedding in fp32" in refused(*model, "--precision", "reference")
    assert "compute exact" in refused(*model, "--compute", "exact")
    predicted = ("--case", "performance-ci-1", "--target", "n150", "--compute", "exact")
    assert "compute exact" in refused("--model", str(tiny_gguf), *predicted)
    rotated = ("--model", str(tiny_gguf), "--case", "performance-eval-repeat", "--target", "n150")
    assert "emulated once; allowed: other cases" in refused(*rotated)
    assert "4 query heads over 8 chips" in refused(*model[:-1], "t3k")


def test_how_long_an_emulation_takes_is_said_before_it_begins(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the case that it names is there, and short."""
    model = ("--model", str(tiny_gguf), "--target", "n150", "--no-results")
    assert main(["bench", *model, "--prompt", "hello", *FEW]) == 0
    said = capfd.readouterr().err
    assert "the board is emulated, multiply by multiply: about 30 s on two cores" in said
    name = said.partition("--case ")[2].partition(")")[0]
    assert name == "performance-short" and CASES[name].max_generated_tokens == 16
    assert main(["bench", *model, "--case", "performance-device-perf"]) == 0
    assert "emulated" not in capfd.readouterr().err, "a prediction takes no time"


def test_board_without_numba_names_its_extra(
    refused: Refused, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tilewright.compiler.targets.tenstorrent.emulate as package

    for name in list(sys.modules):
        if name.startswith((f"{package.__name__}.matrix_unit_", "numba")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(package, "matrix_unit_cpu", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    said = refused("--target", "n150", "--model", str(tiny_gguf), "--prompt", "hello", *FEW)
    assert said.startswith("emulated boards: import of numba halted")
    assert said.endswith("; allowed: pip install -e '.[boards]' in the clone")
