"""``tilewright batch`` from a file to a file: resumed after kills, errors alone, in order."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.test_ranks import followers_of
from tilewright import LLM
from tilewright.batch.journal import BatchJournal
from tilewright.cli.main import main
from tilewright.cli.processes import batch_engine
from tilewright.errors import CompileError, RankError
from tilewright.utils.child_process import PYTHON

FAST = ("--target", "null", "--no-cache")
CONTEXT = ("--max-context", "256")


def make_set(path: Path, count: int, *, seed: int = 0) -> Path:
    draw = random.Random(seed)
    rows = [[f"row {row}", 2, draw.randint(1, 60)] for row in range(count)]
    path.write_text(json.dumps(rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def command(data: Path, out: Path, model: Path, *more: str) -> list[str]:
    context = () if CONTEXT[0] in more else CONTEXT
    return [str(data), "-o", str(out), "--model", str(model), *FAST, *context, *more]


@pytest.fixture
def triples(tmp_path: Path) -> Path:
    return make_set(tmp_path / "set.json", 30)


def test_answers_are_in_the_inputs_order_and_the_figures_are_printed(
    tiny_gguf: Path, triples: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out.jsonl"
    said = run("batch", *command(triples, out, tiny_gguf, "--ignore-eos"))
    assert [line.split(":")[0] for line in said.splitlines()[:5]] == [
        *("Throughput", "Tokens/s", "Prompt_num_tokens", "Total_num_tokens", "Output tokens/s"),
    ]
    rows = json.loads(triples.read_text())
    found = lines_of(out)
    assert [each["prompt"] for each in found] == [row[0] for row in rows]
    assert [each["completion_tokens"] for each in found] == [row[2] for row in rows]
    assert not out.with_name("out.jsonl.journal").exists()
    assert set(tmp_path.iterdir()) == {triples, out}, "nothing else is left"


def test_unordered_rows_are_the_same_in_the_order_of_their_ends(
    tiny_gguf: Path, triples: Path, tmp_path: Path, run: Run
) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    run("batch", *command(triples, one, tiny_gguf))
    run("batch", *command(triples, other, tiny_gguf, "--unordered"))
    assert lines_of(one) != lines_of(other)
    key = lambda each: each["prompt"]  # noqa: E731
    assert sorted(lines_of(one), key=key) == sorted(lines_of(other), key=key)


def test_samples_are_drawn_by_the_seed_and_made_rows_need_no_file(
    tiny_gguf: Path,
    triples: Path,
    tmp_path: Path,
    run: Run,
    capfd: pytest.CaptureFixture[str],
) -> None:
    names = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for out, seed in zip(names, ("1", "1", "2"), strict=True):
        run("batch", *command(triples, out, tiny_gguf, "--num-samples", "7", "--seed", seed))
    a, b, c = ([each["prompt"] for each in lines_of(out)] for out in names)
    assert len(a) == 7 and a == b != c
    more = command(triples, tmp_path / "d.jsonl", tiny_gguf, "--num-samples", "31")
    assert main(["batch", *more]) == 0
    assert "30 rows are all there are: --num-samples 31\n" in capfd.readouterr().err
    made = ("--input-len", "9", "--output-len", "5", "--num-samples", "6", "--ignore-eos")
    said = run("batch", "--model", tiny_gguf, *FAST, *CONTEXT, *made, "--json")
    figures = json.loads(said)
    assert figures["rows"] == 6 and figures["prompt_tokens"] == 54
    assert figures["output_tokens"] == 30


def test_rows_that_fail_have_their_line_and_the_exit_code_tells(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "a", "max_tokens": 2, "stream": True, "top_x": 1}
    good = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    bad = {**good, "custom_id": "b", "body": {"prompt": "a", "max_tokens": 0, "top_y": 2}}
    cut = json.dumps(good)[:-10]
    data.write_text("\n".join([json.dumps(good), json.dumps(bad), json.dumps(good), cut]))
    assert main(["batch", *command(data, out, tiny_gguf)]) == 1
    said = capfd.readouterr().err
    assert "3 of 4 rows could not be answered; their lines in" in said
    assert "ignored in rows' bodies: top_x (1), stream (1)\n" in said, "of answers"
    found = lines_of(out)
    assert [each["custom_id"] for each in found] == ["a", "b", "a", None]
    assert [each["response"]["status_code"] for each in found] == [200, 400, 400, 400]
    assert "max_tokens" in found[1]["error"]["message"]
    assert found[2]["error"]["code"] == "duplicate_id"
    before = out.read_bytes()
    assert main(["batch", *command(data, out, tiny_gguf), "--resume"]) == 1, "as the first run"
    assert "3 of 4 rows could not be answered; their lines in" in capfd.readouterr().err
    assert out.read_bytes() == before


@pytest.mark.parametrize("name", ["out.json", "out.jsonl"])
def test_a_complete_output_says_again_how_many_failed(
    name: str, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "set.json", tmp_path / name
    data.write_text(json.dumps([["a", 1, 2], ["b", 1, "long"], ["c" * 300, 1, 2]]))
    for more in ([], ["--resume"], ["--resume"]):
        assert main(["batch", *command(data, out, tiny_gguf, *more)]) == 1
        assert "2 of 3 rows could not be answered" in capfd.readouterr().err
    out.write_text("no output of a batch")
    assert main(["batch", *command(data, out, tiny_gguf, "--resume")]) == 2
    assert out.read_text() == "no output of a batch"


@pytest.mark.parametrize(
    "words, said",
    [
        (["set.json", "-o", "set.json"], "set.json: is there already; allowed: a new file"),
        (["set.json", "-o", "out.csv"], "out.csv: .csv of the ASC24 data set; allowed: .jsonl"),
        (["set.json", "--dataset", "set.json"], "INPUT and --dataset; allowed: one of them"),
        ([], "no data set; allowed: INPUT, or --input-len, --output-len and --num-samples"),
        (["set.json", "--input-len", "3"], "--input-len with a data set"),
        (["set.json", "--resume"], "--resume without --output"),
        (["set.json", "--actors", "3"], "--actors 3 without Ray; allowed: --engine ray"),
        (["none.json", "-o", "out.json"], "data set none.json: No such file or directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    words: list[str],
    said: str,
    triples: Path,
    tiny_gguf: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(triples.parent)
    before = sorted(triples.parent.iterdir())
    assert main(["batch", *words, "--model", str(tiny_gguf), *FAST, *CONTEXT]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert sorted(triples.parent.iterdir()) == before


def test_a_run_that_ends_before_its_first_row_leaves_nothing_to_go_on_with(
    tiny_gguf: Path, triples: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    out = triples.with_name("out.jsonl")

    def refuse(*given: object, **more: object) -> None:
        raise CompileError("no room")

    with monkeypatch.context() as changed:
        changed.setattr(batch_engine, "batch_engine", refuse)
        assert main(["batch", *command(triples, out, tiny_gguf)]) == 2
    assert list(triples.parent.iterdir()) == [triples]
    run("batch", *command(triples, out, tiny_gguf))


def test_a_full_disk_is_named_and_the_run_goes_on_where_it_was(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run
) -> None:
    """Full while rows are answered, then while the output is made; there is room in the end."""
    data, whole, out = (tmp_path / name for name in ("set.json", "whole.jsonl", "out.jsonl"))
    data.write_text(json.dumps([[f"row {row} {'x' * 900}", 1, 3] for row in range(60)]))
    room = ("--max-context", "1024")
    run("batch", *command(data, whole, tiny_gguf, *room))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert whole.stat().st_size > 50_000
    for most, more in ((15_000, []), (50_000, ["--resume"])):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
        try:
            assert main(["batch", *command(data, out, tiny_gguf, *room, *more)]) == 2
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        line = capfd.readouterr().err.splitlines()[-1]
        assert "out.jsonl" in line and "File too large; --resume" in line
        assert set(tmp_path.iterdir()) == {data, whole, out.with_name("out.jsonl.journal")}
    run("batch", *command(data, out, tiny_gguf, *room, "--resume"))
    assert out.read_bytes() == whole.read_bytes()


def test_a_resumed_run_must_be_the_same_and_one_that_is_complete_stays(
    tiny_gguf: Path,
    triples: Path,
    tmp_path: Path,
    stop_at: Stop,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out.jsonl"
    asked = command(triples, out, tiny_gguf)
    stop_at(asked, 900)
    assert main(["batch", *asked]) == 2
    assert "a run was stopped there; allowed: --resume" in capfd.readouterr().err
    for more, said in (
        (["--ignore-eos"], "was begun with ends the model's, not ignored"),
        (["--num-samples", "5"], "was begun with samples 30 of 30, not 5 of 30"),
        (["--temperature", "1"], "was begun with sampling"),
    ):
        assert main(["batch", *asked, "--resume", *more]) == 2
        assert said in capfd.readouterr().err
    make_set(triples, 30, seed=1)
    assert main(["batch", *asked, "--resume"]) == 2
    assert "was begun with data set" in capfd.readouterr().err
    make_set(triples, 30)
    assert main(["batch", *asked, "--resume"]) == 0
    before = out.read_bytes()
    assert main(["batch", *asked, "--resume"]) == 0
    assert "is complete already" in capfd.readouterr().err
    assert out.read_bytes() == before


Stop = Callable[[Sequence[str], int], None]


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """Runs in this process until the journal has got so many bytes more, and stops in its line."""

    def run(asked: Sequence[str], num_bytes: int) -> None:
        left = num_bytes

        def write(journal: BatchJournal, data: bytes) -> None:
            nonlocal left
            os.write(journal._handle, data[:left])
            journal._size += len(data)
            left -= len(data)
            if left <= 0:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(BatchJournal, "_write", write)
            assert main(["batch", *asked]) == 130

    return run


def test_stopped_in_any_line_and_resumed_every_row_is_there_once(
    tiny_gguf: Path, tmp_path: Path, stop_at: Stop, run: Run
) -> None:
    data = make_set(tmp_path / "set.json", 60)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    run("batch", *command(data, whole, tiny_gguf))
    asked = [*command(data, out, tiny_gguf), "--resume"]
    for num_bytes in (1, 700, 3001, 5555):
        stop_at(asked, num_bytes)
        assert not out.exists()
    run("batch", *asked)
    assert out.read_bytes() == whole.read_bytes()


def test_answers_of_a_resumed_run_are_of_one_time_and_have_their_ids(
    tiny_gguf: Path, tmp_path: Path, stop_at: Stop, run: Run
) -> None:
    data, out = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "a", "max_tokens": 9, "temperature": 1.0}
    asked = [{"custom_id": f"r{row}", "url": "/v1/completions", "body": body} for row in range(20)]
    data.write_text("".join(f"{json.dumps(each)}\n" for each in asked))
    stop_at(command(data, out, tiny_gguf), 2000)
    run("batch", *command(data, out, tiny_gguf, "--resume"))
    found = lines_of(out)
    assert [each["custom_id"] for each in found] == [f"r{row}" for row in range(20)]
    bodies = [each["response"]["body"] for each in found]
    assert len({each["created"] for each in bodies}) == 1
    assert len({each["id"] for each in bodies}) == len({each["id"] for each in found}) == 20


def test_killed_and_resumed_every_row_is_there_once(tiny_gguf: Path, tmp_path: Path) -> None:
    check_kills(tiny_gguf, tmp_path, num_rows=400, num_kills=1)


@pytest.mark.slow
def test_killed_twenty_times_every_row_of_ten_thousand_is_there_once(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    check_kills(tiny_gguf, tmp_path, num_rows=10_000, num_kills=20)


def check_kills(model: Path, folder: Path, *, num_rows: int, num_kills: int) -> None:
    """Kill a run at random moments and resume it; the output is that of a run nobody stopped."""
    data = make_set(folder / "set.json", num_rows)
    whole, out = folder / "whole.jsonl", folder / "out.jsonl"
    assert main(["batch", *command(data, whole, model)]) == 0
    asked = [*command(data, out, model), "--resume"]
    draw, num_killed = random.Random(0), 0
    for moment in sorted(draw.sample(range(1, num_rows), num_kills)):
        num_killed += kill_at(asked, out, moment) == -signal.SIGKILL
    assert num_killed == num_kills
    assert main(["batch", *asked]) == 0
    found = lines_of(out)
    assert [each["prompt"] for each in found] == [f"row {row}" for row in range(num_rows)]
    assert out.read_bytes() == whole.read_bytes()


def test_ranks_of_a_batch_are_part_of_what_it_is(
    tiny_gguf: Path, triples: Path, stop_at: Stop, capfd: pytest.CaptureFixture[str]
) -> None:
    out = triples.with_name("out.jsonl")
    stop_at(command(triples, out, tiny_gguf), 900)
    for more, said in (
        (
            ["--tensor-parallel", "2", "--wire", "bf16"],
            "was begun with ranks nothing, not 2, bf16 sent; allowed",
        ),
        (["--tensor-parallel", "2", "--shares", "1"], "1 shares for 2 ranks; allowed: one a rank"),
        (
            ["--engine", "ray", "--tensor-parallel", "2", "--nnodes", "2", "--master-addr", "h"],
            "--engine ray in a group that others start too; allowed: --tensor-parallel-size",
        ),
    ):
        assert main(["batch", *command(triples, out, tiny_gguf), "--resume", *more]) == 2
        assert said in capfd.readouterr().err


@pytest.mark.slow
def test_a_batch_whose_rank_is_killed_goes_on_where_it_was(tiny_gguf: Path, tmp_path: Path) -> None:
    data = make_set(tmp_path / "set.json", 600)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert main(["batch", *command(data, whole, tiny_gguf)]) == 0
    asked = [*command(data, out, tiny_gguf, "--tensor-parallel", "2"), "--resume"]
    for moment in (1, 200):
        assert kill_at(asked, out, moment, of=1) == RankError.exit_code
    assert main(["batch", *asked]) == 0
    assert out.read_bytes() == whole.read_bytes()


def kill_at(asked: Sequence[str], out: Path, num_lines: int, *, of: int = 0) -> int:
    """Run in a process of which a rank is killed once its journal has so many lines; its exit
    code.
    """
    journal = out.with_name(f"{out.name}.journal")
    child = subprocess.Popen(
        [*PYTHON, "-m", "tilewright.cli.main", "batch", *asked],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while child.poll() is None:
        if journal.exists() and journal.read_bytes().count(b"\n") >= num_lines:
            for pid in followers_of(child.pid) if of else [child.pid]:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)
    _, said = child.communicate()
    expected = RankError.exit_code if of else -signal.SIGKILL
    assert child.returncode in (0, expected), said.decode()
    return child.returncode


def test_answers_are_those_of_one_row_at_a_time(tiny_gguf: Path, tmp_path: Path, run: Run) -> None:
    data, out = tmp_path / "set.jsonl", tmp_path / "out.jsonl"
    prompts = ["hello", "a b c", "twelve", "the end", "hello you", "x" * 40]
    data.write_text("\n".join(json.dumps({"prompt": each}) for each in prompts))
    options = ("--precision", "bf16", "--no-cache", "--max-seats", "4", "--max-tokens", "9")
    run("batch", data, "-o", out, "--model", tiny_gguf, *options, "--compute", "exact")
    with LLM(tiny_gguf, precision="bf16", compute="exact", max_num_seqs=1, use_cache=False) as llm:
        alone = [llm.generate(each, max_tokens=9) for each in prompts]
    found = lines_of(out)
    assert [each["text"] for each in found] == [each.text for each in alone]
    assert [each["finish_reason"] for each in found] == [each.finish_reason for each in alone]
    assert [each["prompt_tokens"] for each in found] == [each.num_prompt_tokens for each in alone]


def test_a_chat_goes_through_the_models_template(tiny_gguf: Path, tmp_path: Path, run: Run) -> None:
    data, out, plain = (tmp_path / name for name in ("set.jsonl", "out.jsonl", "plain.jsonl"))
    data.write_text('{"q": "hello"}\n{"q": [{"role": "user", "content": "hello"}]}\n')
    asked = ("--prompt-column", "q", "--max-tokens", "4")
    run("batch", *command(data, out, tiny_gguf, *asked, "--chat"))
    first, second = (each["prompt_tokens"] for each in lines_of(out))
    run("batch", *command(data, plain, tiny_gguf, *asked))
    assert first == second > lines_of(plain)[0]["prompt_tokens"]
