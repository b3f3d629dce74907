"""Embeddings over HTTP: forms of input, formats of vectors, bad input, and the openai client."""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.conftest import Server
from tests.serve.fronts import Running, is_idle, running_front, wait_until
from tilewright.serve.web.settings import ServerConfig

ODD, EVEN = [0.6, 0.8, 0.0], [0.0, 0.6, 0.8]
"""What the fake engine makes of the mean of a prompt, by its first token."""


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    with running_front(ServerConfig(max_queue=5)) as running:
        yield running


def embed(running: Running, value: Any, **changes: Any) -> tuple[int, Any]:
    status, found, _ = running.post("/v1/embeddings", {"input": value, **changes})
    return status, found


@pytest.mark.parametrize(
    ("value", "vectors", "count"),
    [
        ("a", [ODD], 1),
        (["a", "bc"], [ODD, EVEN], 3),
        ([97, 98], [ODD], 2),
        ([[97], [98, 99], [1]], [ODD, EVEN, ODD], 4),
        (["a", "b"] * 7, [ODD, EVEN] * 7, 14),
    ],
)
def test_every_form_of_input_has_a_vector_each(
    front: Running, value: Any, vectors: list[list[float]], count: int
) -> None:
    status, found = embed(front, value)
    assert status == 200 and found["object"] == "list" and found["model"] == "fake"
    assert [each["index"] for each in found["data"]] == [*range(len(vectors))]
    for each, expected in zip(found["data"], vectors, strict=True):
        assert each["embedding"] == pytest.approx(expected)
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_formats_dimensions_and_pooling_are_the_request_s(front: Running) -> None:
    _, found = embed(front, "a", encoding_format="base64")
    raw = base64.b64decode(found["data"][0]["embedding"])
    assert struct.unpack("<3f", raw) == pytest.approx(ODD)
    _, found = embed(front, "b", dimensions=2)
    assert found["data"][0]["embedding"] == pytest.approx([0.0, 1.0])
    _, found = embed(front, "a", pooling="last", user="u", zig=1)
    assert found["data"][0]["embedding"] == pytest.approx([0.8, 0.6, 0.0])
    with running_front(ServerConfig(pooling="last")) as other:
        assert embed(other, "a")[1]["data"][0]["embedding"] == pytest.approx([0.8, 0.6, 0.0])
        props = json.loads(other.ask("GET", "/props")[1])
        assert props["pooling"] == "last" and props["embedding_size"] == 3


@pytest.mark.parametrize(
    ("value", "changes", "said"),
    [
        ("", {}, "input: empty; allowed"),
        ([], {}, "input: Expected `array` of length >= 1"),
        (["a", ""], {}, "input[1]: empty; allowed"),
        ([[]], {}, "input[0]: Expected `array` of length >= 1"),
        (["a"] * 2049, {}, "input: 2049; allowed: up to 2048"),
        ([3, 256], {}, "input: token 256; allowed: 0 to 255"),
        ([[3], [999]], {}, "input[1]: token 999; allowed: 0 to 255"),
        ([-1], {}, ">= 0"),
        (["a", 3], {}, "a list of texts, of ids, or of lists of ids"),
        (["a", "b" * 4097], {}, "input[1]: 4097 tokens; allowed: up to 4096"),
        (None, {}, "input: Expected"),
        ("a", {"dimensions": 4}, "dimensions: 4; allowed: 1 to 3"),
        ("a", {"dimensions": 0}, "dimensions: Expected"),
        ("a", {"encoding_format": "int8"}, "encoding_format: Invalid"),
        ("a", {"pooling": "max"}, "pooling: Invalid"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    front: Running, value: Any, changes: dict[str, Any], said: str
) -> None:
    status, found = embed(front, value, **changes)
    assert status == 400, found
    message = found["error"]["message"]
    assert said in message and "\n" not in message
    assert embed(front, "a")[0] == 200


def test_the_openai_client_embeds(front: Running) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="any", input=["a", "b"])  # base64 underneath
    assert [each.embedding for each in found.data] == [pytest.approx(ODD), pytest.approx(EVEN)]
    found = client.embeddings.create(
        model="any", input=[[97], [98]], encoding_format="float", dimensions=1
    )
    assert [each.embedding for each in found.data] == [[1.0], [0.0]]
    assert found.usage.prompt_tokens == 2
    with pytest.raises(openai.BadRequestError, match="allowed: up to 2048"):
        client.embeddings.create(model="any", input=["x"] * 2049)


def test_failures_end_the_request_alone(front: Running) -> None:
    status, found = embed(front, ["a", "N"])
    assert status == 500 and found["error"]["code"] == "not_a_number"
    wait_until(lambda: is_idle(front))
    text = front.ask("GET", "/metrics")[1].decode()
    assert 'prompt_tokens_total{engine="0",model_name="fake"}' in text


def test_a_model_embeds_texts(server: Server) -> None:
    """Alike alone and in a batch, whatever was cached; means and last states differ."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    texts = ["one text", "another one", "one text", "a longer text " * 20]
    found: dict[str, list[list[float]]] = {}
    for kind in ("mean", "last"):
        asked: dict[str, Any] = {"model": "any", "extra_body": {"pooling": kind}}
        together = client.embeddings.create(input=texts, **asked)
        found[kind] = [each.embedding for each in together.data]
        for text, vector in zip(texts, found[kind], strict=True):
            alone = client.embeddings.create(input=text, **asked).data[0].embedding
            assert alone == pytest.approx(vector, abs=1e-5)
            assert math.hypot(*vector) == pytest.approx(1, abs=1e-5)
        assert found[kind][0] == pytest.approx(found[kind][2], abs=1e-5)
    assert found["mean"][0] != pytest.approx(found["last"][0], abs=1e-2)
    assert len(found["mean"][0]) == server.get("/props")["embedding_size"]
