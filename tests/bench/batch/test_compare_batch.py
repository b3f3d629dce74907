"""Batches beside others: the table, a server of llama.cpp's manner, and answers that part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.batch import command
from bench.batch.answers import Parting, first_parting, render
from bench.batch.command import OURS, THEIRS
from bench.batch.command import render as render_sides
from bench.batch.made import RowOptions
from bench.batch.sides import Sizes, theirs
from tests.cli.conftest import Run
from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.errors import ConfigError
from tilewright.runtime.request import Request

_SERVER = """#!{python}
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def do_GET(self): self.say({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["ignore_eos"] and not asked["cache_prompt"] and not asked["stream"]
        self.say({{"tokens_predicted": asked["n_predict"]}})
    def say(self, what):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(what).encode())
    def log_message(self, *words): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[sys.argv.index("-np") + 1] == "3" and sys.argv[sys.argv.index("-c") + 1] == "300"
http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""


def test_every_row_is_asked_of_llama_cpp_to_its_length(tmp_path: Path) -> None:
    server = tmp_path / "llama-server"
    server.write_text(_SERVER.format(python=sys.executable))
    server.chmod(0o755)
    bodies = [row["body"] for row in RowOptions(rows=11, shrink=8).made()]
    sizes = Sizes(seats=3, context=100, threads=1)
    found = theirs(bodies, server, tmp_path / "m.gguf", sizes)
    assert found["rows"] == 11
    assert found["output_tokens"] == sum(body["max_tokens"] for body in bodies)


def test_the_table_has_both_medians_and_their_ratio() -> None:
    figures = {"requests_per_second": 1.0, "seconds": 2.0}
    rows = [
        {"side": side, "output_tokens_per_second": rate, **figures, "mean_batch": 3.0}
        for side, rates in ((OURS, (100.0, 300.0, 200.0)), (THEIRS, (90.0, 100.0, 800.0)))
        for rate in rates
    ]
    lines = render_sides(rows).splitlines()
    assert [cell.strip() for cell in lines[2].split("|")[1:-1]] == [
        *("output t/s", "200.0", "100.0", "2.00 x"),
    ]
    assert any("mean batch" in line for line in lines)


def test_the_first_parting_has_its_gap() -> None:
    scores = [LogProbs(-0.5, ((7, -0.5), (8, -0.75))), LogProbs(-0.1, ((9, -0.1),))]
    alone = Request(0, (1,), output=[7, 9], logprobs=scores)
    assert first_parting(3, alone, [7, 9]) is None
    assert first_parting(3, alone, [8, 5]) == Parting(3, 0, 7, 8, 0.25)
    assert first_parting(3, alone, [7, 5]) == Parting(3, 1, 9, 5, None)
    text = render([Parting(3, 0, 7, 8, 0.25), Parting(4, 1, 9, 5, None)], 10, 99)
    assert text.startswith("8 of 10 rows are equal, of 99 tokens\n")
    assert "0.2500" in text and "above the 20 likeliest" in text


def test_a_batchs_answers_are_compared_with_those_alone(tiny_gguf: Path, run: Run) -> None:
    tiny = ("--precision", "reference", "--compute", "exact", "--model", tiny_gguf)
    said = run(
        "batch-answers",
        "--rows",
        "5",
        "--shrink",
        "32",
        "--seats",
        "3",
        "--vocabulary",
        "200",
        *tiny,
    )
    assert "5 of 5 rows are equal" in said


def test_shrunk_rows_keep_at_least_a_token() -> None:
    for row in RowOptions(rows=50, shrink=64).made():
        assert row["body"]["prompt"] and row["body"]["max_tokens"] >= 1
    assert json.dumps(RowOptions(rows=2, shrink=2).made())


@pytest.mark.slow
def test_answers_of_the_default_model_are_those_of_one_row_at_a_time(
    run: Run, smollm2_path: Path
) -> None:
    said = run("batch-answers", "--rows", "24", "--shrink", "4", "--precision", "all-q80")
    assert "of 24 rows are equal" in said


def test_a_program_that_is_not_there_is_said_before_our_side_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "ours", lambda *given: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match="none: there is no llama-server"):
        command.main(["--llama-server", str(tmp_path / "none")])
