"""``tilewright nodes``: dllama's counting, a task's folders, workers on other machines."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.conftest import Refused, Run
from tests.dllama_files import model_bytes, random_weights, tokenizer_bytes, tokens
from tests.serve.conftest import free_port
from tilewright.compiler.child import PYTHON
from tilewright.compiler.commands import nodes
from tilewright.compiler.commands.arguments import ModelOptions
from tilewright.compiler.distributed import launch
from tilewright.compiler.targets.cpu.native import build

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
    said = run("nodes", *command(model, "--steps", "20", "--prompt", PROMPT))
    evaluated, predicted = counts(said)
    assert evaluated == 2 and predicted == 18, "20 tokens together"
    assert "nBatches: 512" in said and "sent:" not in said, "nobody is there to be sent anything"
    assert len(re.findall(r"tokens/s: [\d.]+ \([\d.]+ ms/tok\)", said)) == 2


def test_a_task_leaves_what_the_competition_wants(model: Path, tmp_path: Path, run: Run) -> None:
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for number, name in enumerate(("short", "long", "leaderboard")):
        (prompts / f"{name}.txt").write_text(PROMPT * (number + 1))
    out = tmp_path / "out"
    more = ("--task", "2", "--prompts", str(prompts), "-o", str(out), "--steps", "24")
    run("nodes", *command(model, *more))
    assert {each.name for each in (out / "task_2").iterdir()} == {"short", "long", "leaderboard"}
    for folder in (out / "task_2").iterdir():
        assert sorted(each.name for each in folder.iterdir()) == [
            *("output.txt", "run.sh", "timestamps.txt"),
        ]
        said = (folder / "output.txt").read_text()
        assert said.startswith(PROMPT) and sum(counts(said)) == 24
        assert "nodes --model" in (folder / "run.sh").read_text()
        began, ended = (folder / "timestamps.txt").read_text().splitlines()
        assert began.startswith("start 2") and ended.startswith("end 2")


@pytest.fixture
def worker(model: Path) -> Iterator[str]:
    """Another machine's command, here: where it waits."""
    port = free_port()
    given = ["nodes", "worker", "--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
    process = subprocess.Popen(
        [*PYTHON, "-m", "tilewright.compiler.cli", *given],
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
    model: Path, worker: str, run: Run, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = command(model, "--steps", "20", "--prompt", PROMPT)
    alone = text(run("nodes", *asked))
    monkeypatch.setenv("TILEWRIGHT_TOKEN", "another")
    said = refused(*asked, "--workers", worker, verb="nodes")
    assert f"rank 1, a worker at tcp:{worker} hung up" in said and "TILEWRIGHT_TOKEN" in said
    monkeypatch.setenv("TILEWRIGHT_TOKEN", TOKEN)
    with monkeypatch.context() as changed:
        changed.setenv("TILEWRIGHT_CUDA_TRIALS", "x")  # as another version's sources differ
        said = refused(*asked, "--workers", worker, verb="nodes")
        assert "rank 0 has TILEWRIGHT_CUDA_TRIALS x and rank 1 nothing; allowed: the same" in said
    said = run("nodes", *asked, "--workers", worker, "--shares", "3,1")
    assert text(said) == alone
    assert re.search(r"sent: [\d.]+ kB/tok", said)


def test_a_worker_that_is_not_there_is_named(
    model: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_WORKER_SECONDS", 0.2)
    monkeypatch.setenv("TILEWRIGHT_TOKEN", TOKEN)
    where = f"127.0.0.1:{free_port()}"
    asked = command(model, "--steps", "20", "--prompt", PROMPT, "--workers", where)
    said = refused(*asked, verb="nodes")
    assert f"rank 1, a worker at tcp:{where} did not answer rank 0 within 0.2 s (Connec" in said


def test_sums_of_blocks_travel_in_blocks(smollm2_path: Path) -> None:
    for compute, path, named, wire in (
        ("fast", smollm2_path, None, "q80"),
        ("fast", smollm2_path, "bf16", "bf16"),
        ("fast", smollm2_path.parent, None, "bf16"),
        ("exact", smollm2_path, "q80", "fp32"),
    ):
        options = ModelOptions(path, "cpu", compute, precision=None, dump_dir=None)
        assert nodes._wire(options, named) == wire


def test_what_cannot_be_run_is_said_in_one_line(
    model: Path, tmp_path: Path, refused: Refused
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
        (("--nodes", "5", "--prompt", PROMPT), "4 query heads over 5 ranks; allowed: at most 4"),
    ):
        assert words in refused(*command(model, *more), verb="nodes")
