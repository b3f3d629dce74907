"""Batches and a server like llama.cpp's: requests to their lengths, and the table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.batch import command
from bench.batch.command import OURS, THEIRS, serve_rows
from bench.batch.command import render as render_sides
from bench.batch.made import RowOptions
from bench.common import llama_cpp
from tilewright.errors import ConfigError

_SERVER = """#!{python}
import http.server, json, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    def do_GET(self): self.say({{"status": "ok"}})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert asked["ignore_eos"] and not asked["cache_prompt"]
        usage = {{"completion_tokens": asked["max_tokens"], "prompt_tokens": 1}}
        self.say({{"choices": [{{"text": "x"}}], "usage": usage}})
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
    started = llama_cpp(server, tmp_path / "m.gguf", users=3, context=100, threads=1)
    found = serve_rows(started, bodies, 3)
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


def test_shrunk_rows_keep_at_least_a_token() -> None:
    for row in RowOptions(rows=50, shrink=64).made():
        assert row["body"]["prompt"] and row["body"]["max_tokens"] >= 1
    assert json.dumps(RowOptions(rows=2, shrink=2).made())


def test_a_program_that_is_not_there_is_said_before_our_side_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_json", lambda *given: pytest.fail("it ran"))
    with pytest.raises(ConfigError, match="none: there is no llama-server"):
        command.main(["--llama-server", str(tmp_path / "none")])
