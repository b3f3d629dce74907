"""A Prometheus that scrapes ``/metrics``: OpenMetrics, which it asks for, and plain text."""

from __future__ import annotations

import http.server
import json
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import free_port
from tests.serve.external.programs import needs, running_program
from tests.serve.fronts import Running, chat, running_front, wait_until

pytestmark = [pytest.mark.external, needs("prometheus")]

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: openmetrics
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: text
    static_configs: [{{targets: ["127.0.0.1:{plain}"]}}]
"""


@contextmanager
def plain_text_of(front: Running) -> Iterator[int]:
    """A port whose ``/metrics`` are the server's in plain text: an old Prometheus asks for it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body, headers = front.ask("GET", self.path, accept="text/plain;version=0.0.4")
            self.send_response(status)
            self.send_header("content-type", headers["content-type"])
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_prometheus_scrapes_both_formats(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{url}{path}?{query}", timeout=10) as answer:
            return json.load(answer)["data"]

    def values(query: str) -> dict[str, float]:
        try:
            found = ask("query", query=query)["result"]
        except OSError:
            return {}
        return {each["metric"]["job"]: float(each["value"][1]) for each in found}

    with running_front() as front, plain_text_of(front) as plain:
        config = tmp_path / "prometheus.yml"
        config.write_text(CONFIG.format(port=front.port, plain=plain))
        command = ["prometheus", f"--config.file={config}"]
        command += [f"--storage.tsdb.path={tmp_path / 'db'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
        with running_program([*command, "--log.level=warn"], tmp_path / "log"):
            for _ in range(3):
                front.post("/v1/chat/completions", chat("a", max_tokens=5), x_request_id="mine")
            jobs = {"openmetrics", "text"}
            count = "sum by (job) (tilewright:generation_tokens_total)"
            wait_until(lambda: values(count) == dict.fromkeys(jobs, 15.0), seconds=60)
            assert values("up") == dict.fromkeys(jobs, 1.0)
            buckets = "sum by (le, job) (tilewright:request_prompt_tokens_bucket)"
            assert values(f"histogram_quantile(0.5, {buckets})").keys() == jobs
            targets = ask("targets")["activeTargets"]
            assert [each["lastError"] for each in targets] == ["", ""]
            assert not (tmp_path / "log").read_text(), "it complains of nothing that it reads"
            kinds = ask("metadata", metric="tilewright:time_to_first_token_seconds")
            assert {each["type"] for found in kinds.values() for each in found} == {"histogram"}
            found = ask(
                "query_exemplars",
                query='{__name__=~"tilewright:.*"}',
                start=str(time.time() - 600),
                end=str(time.time()),
            )
            named = {e["seriesLabels"]["job"]: e["exemplars"][0]["labels"] for e in found}
            assert named == {"openmetrics": {"request_id": "mine"}}, "plain text has none"
