"""OpenAI's own clients, of Python and of JavaScript, against a server in processes of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.serve.conftest import Server
from tests.serve.external.programs import needs, node_environment
from tests.serve.fronts import running_front
from tilewright.serve.web.settings import ServerConfig

pytestmark = pytest.mark.external
CLIENT = Path(__file__).with_name("client.cjs")
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "secret": {"type": "string", "format": "password", "maxLength": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
]
COMMANDS: dict[str, Any] = {
    "model": "any",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 150,
}


@pytest.fixture(scope="module")
def python_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def found(server: Server) -> dict[str, Any]:
    """What the client of JavaScript has found."""
    return run_node(f"{server.url}/v1")


def run_node(url: str) -> dict[str, Any]:
    environment = node_environment()
    done = subprocess.run(
        ["node", str(CLIENT), url], env=environment, capture_output=True, timeout=240
    )
    assert done.returncode == 0, done.stderr.decode()
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_python_client_streams(python_client: openai.OpenAI) -> None:
    asked = {**COMMANDS, "max_tokens": 12}
    whole = python_client.chat.completions.create(**asked).choices[0].message.content
    chunks = list(python_client.chat.completions.create(**asked, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole and chunks[-1].choices[0].finish_reason == "length"


def test_python_client_calls_tools(python_client: openai.OpenAI) -> None:
    asked = {**COMMANDS, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = python_client.chat.completions.create(**asked).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with python_client.chat.completions.stream(**asked) as stream:
        (again,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert again.function.arguments == call.function.arguments


def test_python_client_obeys_a_schema(python_client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    choice = python_client.chat.completions.create(**COMMANDS, response_format=form).choices[0]
    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)


@needs("node")
def test_javascript_client_streams(found: dict[str, Any]) -> None:
    assert found["streamed"] == found["whole"]
    assert found["whole"]["text"] and found["whole"]["usage"]["completion_tokens"] == 12


@needs("node")
def test_javascript_client_calls_tools(found: dict[str, Any]) -> None:
    (call,) = found["called"]
    assert call["name"] == "weather"
    jsonschema.validate(json.loads(call["arguments"]), SCHEMA)
    assert [each["arguments"] for each in found["calling"]] == [call["arguments"]]


@needs("node")
def test_javascript_client_obeys_a_schema(found: dict[str, Any]) -> None:
    jsonschema.validate(found["held"], SCHEMA)


@needs("node")
def test_javascript_client_reads_errors_and_models(found: dict[str, Any], server: Server) -> None:
    refused = {"kind": "BadRequestError", "status": 400, "code": "invalid_value"}
    assert found["refused"] == {**refused, "param": "temperature"}
    assert found["missing"] == {**refused, "param": "messages"}
    assert found["models"] == server.get("/v1/models")["data"]


@needs("node")
def test_javascript_client_in_a_browser_may_send_its_headers(found: dict[str, Any]) -> None:
    """A preflight allows each header that this client sends."""
    assert any(name.startswith("x-stainless-") for name in found["sent"])
    origin = "https://app.example"
    with running_front(ServerConfig(cors_origins=(origin,))) as running:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = ",".join(found["sent"])
        status, _, headers = running.ask("OPTIONS", "/v1/chat/completions", **asked)
    assert status == 204
    assert set(found["sent"]) <= set(headers["access-control-allow-headers"].split(", "))
