"""What stands beside what when replicas are measured, and the table of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.serving.replicas import _Options, _places, load, render


class Answers(BaseHTTPRequestHandler):
    """Says two tokens to everybody, whole or in two events of which one is cut."""

    def do_POST(self) -> None:
        """Answer one question."""
        size = int(self.headers["content-length"])
        usage = {"completion_tokens": 2, "prompt_tokens": 3}
        body = {"choices": [{"text": "a"}], "usage": usage}
        self.send_response(200)
        self.end_headers()
        if not json.loads(self.rfile.read(size)).get("stream"):
            self.wfile.write(json.dumps(body).encode())
            return
        first = b'data: {"choices":[{"index":0,"text":"a"}],"usage":null}\n\n'
        last = f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()
        for part in (first[:20], first[20:] + last[:9], last[9:]):
            self.wfile.write(part)
            self.wfile.flush()

    def log_message(self, *of: object) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_users_are_dealt_to_processes_and_counted_together(url: str) -> None:
    options = _Options(clients=2, answers=2, input_tokens=3, styles=("stream", "whole"))
    rows = load(options, url, 3)
    assert [(row["style"], row["output_tokens"], row["clients"]) for row in rows] == [
        ("stream", 12, 2),
        ("whole", 12, 2),
    ]
    seconds = float(rows[0]["seconds"])
    assert rows[0]["chunks_per_second"] == pytest.approx(12 / seconds), "two of each answer"


def test_a_cpu_has_a_share_of_its_threads_all_of_them_and_replicas() -> None:
    found = _places(_Options(threads=4, users=8))
    assert [(each.contestant.name, each.users) for each in found] == [
        ("one, 2 threads", 8),
        ("one, 4 threads", 16),
        ("2 replicas", 16),
    ]
    commands = [" ".join(each.contestant.command) for each in found]
    assert commands[1].endswith("--max-seats 16 --threads 4")
    assert commands[2].endswith("--max-seats 8 --replicas 2 --threads 4")


def test_gpus_have_one_and_as_many_as_replicas() -> None:
    found = _places(_Options(target="cuda", replicas=3, users=64))
    assert [each.users for each in found] == [64, 192]
    assert found[1].contestant.command[-2:] == ("--replicas", "3")


def test_the_first_of_each_style_is_what_others_are_compared_with() -> None:
    def row(server: str, style: str, rate: float) -> dict[str, object]:
        times = {"ttft_ms_p50": 5.0, "tpot_ms_p50": 2.0}
        return {
            "server": server,
            "style": style,
            "users": 4,
            "output_tokens_per_second": rate,
            **times,
        }

    styles = {"stream": (100.0, 190.0), "whole": (200.0, 398.0)}
    rows = [
        row(server, style, rate)
        for style, rates in styles.items()
        for server, rate in zip(("one", "2 replicas"), rates, strict=True)
    ]
    lines = render(rows).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == [
        "1.00 x",
        "1.90 x",
        "1.00 x",
        "1.99 x",
    ]
