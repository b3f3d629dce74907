"""The command as a process: verbs, exit codes, one line for an error, and no torch before it."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.__main__ import COMMANDS
from bench.__main__ import main as bench
from tests.cli.conftest import main_of
from tilewright.cli.main import MAINTAINERS, MOVED, VERBS, main
from tilewright.compiler import __version__
from tilewright.compiler.precision import list_precisions
from tilewright.errors import TilewrightError
from tilewright.evaluate.cases.cases import CASES

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "demo" / "simple_text_demo.py")


def process(*argv: str | bytes, stdin: bytes = b"", cwd: Path = ROOT) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``python ARGV``."""
    done = subprocess.run(
        [sys.executable, *argv], input=stdin, capture_output=True, cwd=cwd, timeout=120, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["-h"], ["--help"]):
        assert main(argv) == 0
        out = capsys.readouterr().out
        assert all(verb in out for verb in VERBS)
    assert main([]) == 2
    assert "usage: tilewright COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        ("run", "--prompt", "hi"),
        ("chat",),
        ("serve", "--target", "null", "--port", "0"),
        ("bench", "--case", "performance-ci-1", "--no-results"),
    ],
    ids=lambda argv: argv[0],
)
def test_a_first_sign_of_life_comes_within_half_a_second(argv: tuple[str, ...]) -> None:
    """Of CPU time, which other work on the machine does not stretch, on a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "tilewright.cli.main", *argv]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    ) as child:
        try:
            said = os.read(ours, 1 << 10)
            spent = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            os.close(ours)
            os.close(theirs)
    assert b"opening " in said
    assert (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK") < 0.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tilewright {__version__}\n"


@pytest.mark.parametrize("verb", ["walk", "", "--verbose", "xy\nz"])
def test_an_unknown_verb_lists_the_known_ones(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb]) == 2
    error = capsys.readouterr().err
    assert error == f"tilewright: unknown command {verb!r}; allowed: {', '.join(VERBS)}\n"


def test_an_unknown_verb_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["comple"]) == bench(["comparee"]) == 2
    ours, of_bench = capsys.readouterr().err.splitlines()
    assert ours.endswith("; did you mean 'compile'?")
    assert of_bench.endswith("; did you mean 'compare'?")


def test_the_verbs_are_of_the_thirteen() -> None:
    """Those that are not there yet are not listed."""
    thirteen = "run chat serve batch compile convert bench sweep calibrate trace plan models pull"
    assert list(VERBS) == [name for name in thirteen.split() if name in VERBS]
    newer = "compare-calibrated compare-drafts images kernels random-files speculative"
    assert set(COMMANDS) - MAINTAINERS == set(newer.split()), "newer than the old names"
    assert set(COMMANDS) >= MAINTAINERS


@pytest.mark.parametrize("verb", [*MOVED, "perf", "compare"])
def test_an_old_name_works_and_prints_the_new_one(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([verb, "--help"])
    captured = capsys.readouterr()
    new = MOVED[verb][1] if verb in MOVED else f"python -m bench {verb}"
    assert captured.err == f"tilewright: {verb} is deprecated; use {new}\n"
    assert captured.out.startswith(f"usage: {' '.join(new.split()[:3])}")


@pytest.mark.parametrize("verb", [*VERBS, *COMMANDS])
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main_of(verb)([verb, "--help"])
    except SystemExit as left:  # argparse prints and leaves; a verb of verbs prints and returns
        code = left.code
    assert code == 0
    program = "tilewright" if verb in VERBS else "python -m bench"
    assert f"usage: {program} {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*VERBS, *COMMANDS])
def test_every_verb_refuses_an_unknown_option(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_of(verb)([verb, "--wrong"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    program = "tilewright" if verb in VERBS else "python -m bench"
    assert f"--wrong (see {program} {verb}" in error


def test_an_error_of_many_lines_is_printed_as_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise TilewrightError("one\n  two\r\nthree")

    monkeypatch.setattr("tilewright.cli.commands.bench.main", fail)
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == "tilewright: one two three\n"


def test_a_keyboard_interrupt_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.cli.commands.bench.main", interrupted)
    assert main(["bench"]) == 130


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> int:
        raise ValueError("ours")

    monkeypatch.setattr("tilewright.cli.commands.bench.main", fail)
    with pytest.raises(ValueError, match="ours"):
        main(["bench"])


BAD = {
    "batch": (["--batch-size", "0"], "--batch-size: '0'; allowed: integers, 1 to 256"),
    "case": (["--case", "quick"], "unknown case 'quick'; allowed: performance-batch-1, "),
    "model": (["--model", "/no/such"], "/no/such: no such file or folder; allowed: a folder"),
    "target": (["--target", "gpu"], "unknown target 'gpu'; allowed: reference, null, cpu"),
    "precision": (["--precision", "bfp9"], "bfp9"),
    "prompt": (["--prompt", " \n"], "the prompt is empty; allowed: some text"),
    "file": (["--input-prompts", "/no/such"], "prompts file '/no/such': No such file"),
    "results": (["--results", "/proc/1/x"], "results file /proc/1/x: "),
}


@pytest.mark.parametrize("name", BAD)
def test_the_demo_refuses_in_one_line(name: str) -> None:
    argv, message = BAD[name]
    code, out, error = process(DEMO, *argv)
    assert (code, out) == (2, "")
    assert error.startswith("tilewright: ") and error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize(
    ("argv", "stdin", "message"),
    [
        (["--prompt", b"a\xff"], b"", "the prompt is not valid UTF-8; allowed: UTF-8 text"),
        (["--prompt", "-"], b"ab\xff\n", "standard input is not valid UTF-8 at byte 2"),
        (["--prompt", "-"], b"", "the prompt is empty"),
        (["--prompt", "-"], b" \n\t", "the prompt is empty"),
        (["--case", b"\xff"], b"", "unknown case '\\udcff'"),
        (["--model", b"/\xff"], b"", "no such file or folder"),
        (["--precision", b"\xff"], b"", "\\udcff"),
        (["--input-prompts", b"/\xff"], b"", "No such file"),
    ],
)
def test_bytes_that_are_no_text(argv: list[str | bytes], stdin: bytes, message: str) -> None:
    code, out, error = process(DEMO, *argv, stdin=stdin)
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert message in error


_WITHOUT = """
import json, sys
from bench.__main__ import COMMANDS, main as bench
from tilewright.cli.main import main
if sys.argv[1].startswith("["):
    (code,) = {main(argv) for argv in json.loads(sys.argv[1])}
else:
    code = (bench if sys.argv[1] in COMMANDS else main)(sys.argv[1:])
heavy = {name.partition(".")[0] for name in sys.modules} & set(
    ["torch", "onnxruntime", "onnx", "transformers", "numpy", "tokenizers", "safetensors", "rich"])
print("heavy:", *sorted(heavy))
sys.exit(code)
"""


def test_arguments_are_checked_before_torch_is_imported() -> None:
    asked = [["bench", *argv] for argv, _ in BAD.values()]
    code, out, error = process("-c", _WITHOUT, json.dumps(asked))
    assert (code, out, error.count("\n")) == (2, "heavy:\n", len(BAD)), error


_ON_CUDA = (
    ("bench", "--target", "cuda"),
    ("bench-cuda", "--rows", "1b-bf16-b1"),
)


@pytest.mark.parametrize("argv", _ON_CUDA, ids=lambda argv: argv[0])
@pytest.mark.parametrize("missing", ["triton", "GPU"])
def test_cuda_without_its_parts_is_refused_before_anything_heavy(
    argv: Sequence[str], missing: str
) -> None:
    """Where there is a GPU, the driver shows none of them to this process."""
    script = "import os, sys\nos.environ.pop('TRITON_INTERPRET', None)\n"
    script += "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
    if missing == "triton":
        script += "sys.modules['triton'] = None\n"
    code, out, error = process("-c", script + _WITHOUT, *argv)
    assert (code, error.count("\n")) == (2, 1), error
    assert missing in error and "allowed: " in error
    assert "torch" not in out


@pytest.mark.parametrize("kind", [("--target", "cuda"), ("--emit", "engine")], ids=" ".join)
def test_compiling_for_cuda_without_triton_is_refused_before_anything_heavy(
    kind: Sequence[str], tmp_path: Path
) -> None:
    """A GPU is not asked for: what is written here may run elsewhere."""
    script = "import sys\nsys.modules['triton'] = None\n" + _WITHOUT
    code, out, error = process("-c", script, "compile", *kind, "-o", str(tmp_path / "x"))
    assert (code, error.count("\n")) == (2, 1) and "torch" not in out, error
    assert "target cuda: triton is not installed; allowed: pip install" in error
    assert list(tmp_path.iterdir()) == []


def test_the_demo_runs_from_any_folder_and_lists_its_cases(tmp_path: Path) -> None:
    code, out, error = process(DEMO, "--list", cwd=tmp_path)
    assert (code, error) == (0, "")
    assert all(name in out for name in CASES)
    assert all(name in out for name in list_precisions())
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = f"{sys.executable} {DEMO} --list | head -1 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=120, check=True)
    assert done.stdout == b"0\n"
    assert done.stderr == b""
