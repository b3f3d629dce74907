"""``tilewright run --nodes``: dllama's counting, a task's folders, workers on other machines."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Refused, Run
from tests.dllama_files import model_bytes, random_weights, tokenizer_bytes, tokens
from tests.serve.conftest import free_port
from tilewright.cli.commands import nodes
from tilewright.cli.main import main
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.distributed import launch
from tilewright.errors import ConfigError
from tilewright.loading import ranks
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig
from tilewright.utils.child_process import PYTHON

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

PROMPT = "hello"
"""Three tokens: one that begins a text, a merge of four letters, and the fifth."""
TOKEN = "of-this-test-alone"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in F32 beside its tokenizer."""
    path = tmp_path_factory.mktemp("dllama") / "dllama_model_tiny.m"
    path.write_bytes(model_bytes("llama", "F32", random_weights()))
    names = tokens()
    data = tokenizer_bytes(names, bos=len(names) - 3, eos=(len(names) - 2,))
    path.with_name("dllama_tokenizer_tiny.t").write_bytes(data)
    return path


def command(model: Path, *more: str) -> list[str]:
    return ["--model", str(model), "--nthreads", "1", "--compute", "exact", *more]


def counts(said: str) -> list[int]:
    return [int(each) for each in re.findall(r"nTokens: (\d+)", said)]


def text(said: str) -> str:
    return said.partition("\nEvaluation\n")[0].rstrip("\n")


def test_steps_count_the_prompt_and_its_last_token_is_a_prediction(model: Path, run: Run) -> None:
    said = run("run", "--nodes", "1", *command(model, "--steps", "20", "--prompt", PROMPT))
    evaluated, predicted = counts(said)
    assert evaluated == 2 and predicted == 18, "20 tokens together"
    assert "nBatches: 512" in said and "sent:" not in said, "nobody is there to be sent anything"
    assert len(re.findall(r"tokens/s: [\d.]+ \([\d.]+ ms/tok\)", said)) == 2


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a task's three prompts."""
    folder = tmp_path_factory.mktemp("task") / "prompts"
    folder.mkdir()
    for number, name in enumerate(("short", "long", "leaderboard")):
        (folder / f"{name}.txt").write_text(PROMPT * (number + 1) + "'s \n%s\n")
    return folder


@pytest.fixture(scope="module")
def task(model: Path, prompts: Path) -> Path:
    """The folder written by a task with partial sums in Q80."""
    out = prompts.parent / "out"
    more = ("--task", "2", "--prompts", str(prompts), "-o", str(out), "--steps", "36")
    more = (*more, "--nodes", "2", "--buffer-float-type", "q80")  # another test has four nodes
    with contextlib.chdir(model.parent):
        assert main(["run", *command(Path(model.name), *more)]) == 0
    return out / "task_2"


def test_a_task_leaves_what_the_competition_wants(task: Path, prompts: Path) -> None:
    assert {each.name for each in task.iterdir()} == {"short", "long", "leaderboard"}
    for folder in task.iterdir():
        assert sorted(each.name for each in folder.iterdir()) == [
            *("output.txt", "run.sh", "timestamps.txt"),
        ]
        said = (folder / "output.txt").read_text()
        assert said.startswith((prompts / f"{folder.name}.txt").read_text())
        assert sum(counts(said)) == 36 and "sent:" in said, "nodes, which send"
        began, ended = (folder / "timestamps.txt").read_text().splitlines()
        assert began.startswith("start 2") and ended.startswith("end 2")
    # the script of one repeats that one alone, wherever it is called
    repeats = task / "long"
    asked = [repeats / "run.sh"]
    done = subprocess.run(asked, cwd="/", capture_output=True, text=True, check=True)
    first = (repeats / "output.txt").read_text()
    assert text(first) == (prompts / "long.txt").read_text() + text(done.stdout)
    assert counts(done.stdout) == counts(first) and "2 ranks, q80 in" in done.stderr


def test_a_task_has_its_own_nodes_and_steps(
    model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int | None, int | None, int | None, list[int], list[str]]] = []

    def stop(given: nodes._NodesArgs, asked: list[nodes._NodesPrompt], folders: list[Path]) -> None:
        steps, notes = [each.steps for each in asked], nodes._notes(given, asked, 4096)
        seen.append((given.nodes, given.nthreads, given.max_seq_len, steps, notes))
        raise ConfigError("far enough")

    monkeypatch.setattr(nodes, "_open", stop)
    own = [975, 4000, 6000]
    ends, model_ends = "6000 steps end at 4096 positions (--max-seq-len)", "the model has 4096"
    for more, given, steps, words in (
        (("--task", "1"), (4, 2, 4096), own, [ends]),
        (("--task", "2"), (4, None, 6000), own, [model_ends, ends]),
        (("--task", "3", "--max-seq-len", "4096"), (4, None, 4096), own, [ends]),
        (
            ("--task", "1", "--nodes", "2", "--nthreads", "1", "--steps", "9"),
            (2, 1, 4096),
            [9] * 3,
            ["nodes 2 in place of 4; nthreads 1 in place of 2; steps 9 in place of 975, 4000, 6"],
        ),
        (
            ("--task", "2", "--workers", "a:1", "--steps", "9"),
            (None, None, 4096),
            [9] * 3,
            ["task 2 with nodes 2 in place of 4; steps"],
        ),
    ):
        with pytest.raises(ConfigError, match="far enough"):
            nodes.main(["--model", str(model), "--prompts", str(prompts), *more])
        *found, found_steps, notes = seen.pop()
        assert (*found, found_steps) == (*given, steps)
        assert len(notes) == len(words)
        assert all(word in note for word, note in zip(words, notes, strict=True))


def test_what_makes_no_difference_is_said(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = ("--steps", "600", "--max-seq-len", "4096", "--buffer-float-type", "q80")
    assert main(["run", *command(model, *more, "--prompt", PROMPT)]) == 0
    said = capfd.readouterr()
    assert sum(counts(said.out)) == 512
    for words in (
        "tilewright: 4096 positions requested; the model has 512",
        "tilewright: 600 steps end at 512 positions (--max-seq-len)",
        "tilewright: --buffer-float-type q80: one node sends nothing",
    ):
        assert words in said.err.splitlines()


def sent(said: str) -> float:
    """Return the kB per predicted token."""
    return float(re.findall(r"sent: ([\d.]+) kB", said)[-1])


@pytest.fixture
def worker(model: Path) -> Iterator[str]:
    """Another machine's command, here: where it waits."""
    port = free_port()
    given = ["run", "--worker", "--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
    process = subprocess.Popen(
        [*PYTHON, "-m", "tilewright.cli.main", *given],
        env={**os.environ, "TILEWRIGHT_TOKEN": TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None and "waits at" in process.stderr.readline()
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def test_a_worker_follows_whoever_knows_the_token(
    model: Path,
    worker: str,
    task: Path,
    run: Run,
    refused: Refused,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of a worker are fp32: more bytes than a task with Q80."""
    asked = command(model, "--steps", "20", "--prompt", PROMPT)
    alone = text(run("run", *asked))
    monkeypatch.setenv("TILEWRIGHT_TOKEN", "another")
    said = refused(*asked, "--workers", worker, verb="run")
    assert f"rank 1, a worker at tcp:{worker} hung up" in said and "TILEWRIGHT_TOKEN" in said
    monkeypatch.setenv("TILEWRIGHT_TOKEN", TOKEN)
    with monkeypatch.context() as changed:
        changed.setattr(ranks, "_kernels_digest", lambda: "x")  # as another version's sources
        said = refused(*asked, "--workers", worker, verb="run")
        assert re.search(r"rank 0 has kernels x and rank 1 \w+; allowed: the same", said)
    said = run("run", *asked, "--workers", worker, "--shares", "3,1")
    assert text(said) == alone
    assert sent((task / "short" / "output.txt").read_text()) < sent(said) / 2


def test_a_worker_that_is_not_there_is_named(
    model: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_WORKER_SECONDS", 0.2)
    monkeypatch.setenv("TILEWRIGHT_TOKEN", TOKEN)
    where = f"127.0.0.1:{free_port()}"
    asked = command(model, "--steps", "20", "--prompt", PROMPT, "--workers", where)
    said = refused(*asked, verb="run")
    assert f"rank 1, a worker at tcp:{where} did not answer rank 0 within 0.2 s (Connec" in said


def test_sums_travel_as_named_else_as_the_arithmetic_is(smollm2_path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # a folder of float weights
    for compute, path, named, wire in (
        ("fast", smollm2_path, None, "q80"),
        ("fast", smollm2_path, "bf16", "bf16"),
        ("fast", tmp_path, None, "bf16"),
        ("exact", smollm2_path, None, "fp32"),
        ("exact", smollm2_path, "f32", "fp32"),
        ("exact", smollm2_path, "q80", "q80"),  # as run --wire q80 --compute exact
    ):
        config = EngineConfig(compute=compute)
        options = ResolvedConfig(config=config, path=path, target="cpu", precision=None)
        assert nodes._wire(options, named) == wire


def test_what_cannot_be_run_is_said_in_one_line(
    model: Path, prompts: Path, tmp_path: Path, refused: Refused
) -> None:
    for more, words in (
        ((), "--prompt"),
        (("--prompt", PROMPT, "--nodes", "2", "--workers", "a:1"), "--workers and --nodes"),
        (("--prompt", PROMPT, "--workers", "a"), "workers a; allowed: HOST:PORT of each"),
        (("--prompt", PROMPT, "--workers", "a..b:1"), "workers a..b:1; allowed: HOST:PORT"),
        (("--prompt", PROMPT, "--backend", "onnxruntime"), "allowed: --backend native"),
        (("--prompt", PROMPT, "--steps", "2"), "a prompt of 3 tokens ('hello'); allowed: 1 to 2"),
        (("--prompt", PROMPT, "--shares", "2,x"), "--shares"),
        (("--prompt", PROMPT, "--nodes", "2", "--shares", "2,1,1"), "3 shares for 2 ranks"),
        (("--prompt", PROMPT, "--tokenizer", str(tmp_path / "t.t")), "--tokenizer"),
        (("--prompt", PROMPT, "--target", "null"), "nodes on target null"),
        (("--task", "2"), "--prompts"),
        (("--task", "2", "--prompts", str(tmp_path)), "short.txt"),
        (("--task", "2", "--prompt", PROMPT), "--prompt with --task; allowed: --prompts DIR"),
        (("--output", "o", "--prompt", PROMPT), "--output with no --task; allowed: --task 1, 2"),
        (("--task", "2", "--prompts", str(prompts), "--steps", "9"), "allowed: 1 to 9 (--steps"),
        (("--nodes", "5", "--prompt", PROMPT), "4 query heads over 5 ranks; allowed: at most 4"),
    ):
        assert words in refused(*command(model, *more), verb="run")
