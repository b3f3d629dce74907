"""OpenAI's client of JavaScript on responses and embeddings."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.serve.external.programs import needs, node_environment
from tests.serve.fronts import running_front
from tests.serve.test_embeddings import EVEN, ODD

CLIENT = Path(__file__).with_name("responses.cjs")


@pytest.mark.external
@needs("node")
def test_javascript_client_has_responses_and_embeddings() -> None:
    environment = node_environment()
    with running_front() as running:
        command = ["node", str(CLIENT), f"{running.url}/v1"]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["texts"] == ["abc"] * 4 and found["items"] == ["message"] * 3
    assert found["kinds"][0] == "response.created" and found["kinds"][-1] == "response.incomplete"
    assert "is not stored" in found["deleted"] and "input: empty" in found["empty"]
    assert found["vectors"] == [pytest.approx(ODD), pytest.approx(EVEN)]
    assert found["floats"] == [[1.0], [0.0]]
