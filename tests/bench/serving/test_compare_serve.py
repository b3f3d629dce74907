"""Our server beside another: what is started, what is printed, what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.serving.command import render
from bench.serving.servers import Contestant, in_turn, llama_cpp, running
from tilewright.compiler.cli import main
from tilewright.compiler.errors import TilewrightError

HEALTHY = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *said): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def test_a_server_runs_while_it_is_asked_and_no_longer(tmp_path: Path) -> None:
    found = Contestant("theirs", (sys.executable, "-c", HEALTHY))
    with running(found, tmp_path / "log") as url:
        assert url.startswith("http://127.0.0.1:")
    failing = Contestant("theirs", (sys.executable, "-c", "raise SystemExit('no model')"))
    with (
        pytest.raises(TilewrightError, match="theirs did not start: no model"),
        running(failing, tmp_path / "log"),
    ):
        pass


def test_rounds_alternate() -> None:
    a, b = Contestant("a", ()), Contestant("b", ())
    assert [(at, each.name) for at, each in in_turn((a, b), 2)] == [
        (0, "a"),
        (0, "b"),
        (1, "a"),
        (1, "b"),
    ]


def test_the_table_has_medians_spread_and_ratio() -> None:
    rows = [
        {"server": server, "pair": "q | Q", "users": 4, "output_tokens_per_second": rate}
        for server, rates in (("tilewright", (30.0, 60.0, 50.0)), ("llama.cpp", (20.0, 25.0)))
        for rate in rates
    ]
    line = render(rows).splitlines()[-1]
    assert "50.0 (30.0 to 60.0)" in line and "22.5 (20.0 to 25.0)" in line and "2.22 x" in line
    nothing = [{**row, "output_tokens_per_second": 0.0} for row in rows]
    assert " x " not in render(nothing).splitlines()[-1], "there is no ratio to nothing"


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TilewrightError, match="there is no llama-server"):
        llama_cpp(tmp_path / "none", tmp_path / "m.gguf", users=1, context=64, threads=1)
    assert main(["compare-serve", "--plan", "soak"]) == 2
    assert "allowed: streams, chat" in capsys.readouterr().err
