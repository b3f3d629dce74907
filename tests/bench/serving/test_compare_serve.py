"""Our server beside another: what is started, what is printed, what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.common import Server, llama_cpp, running
from bench.perf import render_document as rendered
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.report.comparisons import servers_table

ROOT = Path(__file__).parents[3]

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
    found = Server("theirs", (sys.executable, "-c", HEALTHY))
    with running(found, tmp_path / "log") as url:
        assert url.startswith("http://127.0.0.1:")
    failing = Server("theirs", (sys.executable, "-c", "raise SystemExit('no model')"))
    with (
        pytest.raises(TilewrightError, match="theirs did not start: no model"),
        running(failing, tmp_path / "log"),
    ):
        pass


def test_the_table_has_medians_spread_and_ratio() -> None:
    rows = [
        {"server": server, "pair": "q | Q", "users": 4, "output_tokens_per_second": rate}
        for server, rates in (("tilewright", (30.0, 60.0, 50.0)), ("llama.cpp", (20.0, 25.0)))
        for rate in rates
    ]
    line = servers_table(rows).markdown().splitlines()[-1]
    assert "50.0 (30.0 to 60.0)" in line and "22.5 (20.0 to 25.0)" in line and "2.22 x" in line
    assert "| 2.00, 1.25 |" in line, "the noise of equal servers is not shown"
    starts = [{**row, "start_s": 18.0, "num_pages": 900.0} for row in rows]
    assert [" 18.0 " in line for line in servers_table(starts).markdown().splitlines()[-2:]] == [
        True,
        False,
    ]
    nothing = [{**row, "output_tokens_per_second": 0.0} for row in rows]
    assert " x " not in servers_table(nothing).markdown().splitlines()[-1], (
        "there is no ratio to nothing"
    )


def test_a_document_has_the_last_run(tmp_path: Path) -> None:
    facts = {"host": "H", "commit": "abc" * 9, "pair": "q | Q", "users": 4}
    rows = [
        {**facts, "server": server, "round": 0, "date": date, "output_tokens_per_second": rate}
        for date, rate in (("2026-01-01T1", 1.0), ("2026-01-02T1", 30.0))
        for server in ("tilewright", "llama.cpp")
    ]
    text = "a\n<!-- servers:begin cpu -->\nold\n<!-- servers:end cpu -->\nb\n"
    with pytest.raises(ConfigError, match="is missing"):
        rendered(text, tmp_path)
    (tmp_path / "serving").mkdir()
    (tmp_path / "serving/cpu.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = rendered(text, tmp_path)
    assert "| 30.0 " in found and "1.0 (" not in found and "old" not in found
    assert "1 round in turn" in found and "H (2026-01-02, commit abcabcabca)" in found
    assert rendered(found, tmp_path) == found


def test_the_document_s_table_is_its_rows() -> None:
    text = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert "servers:begin cpu -->" in text and rendered(text, ROOT / "results") == text


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TilewrightError, match="there is no llama-server"):
        llama_cpp(tmp_path / "none", tmp_path / "m.gguf", users=1, context=64, threads=1)
    assert main(["compare-serve", "--scenario", "soak"]) == 2
    assert "allowed: streams, chat" in capsys.readouterr().err
