"""What is answered beside chats: the schema, what a model is, who may ask, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.fronts import Running, running_front, wait_until
from tests.serve.test_api_server import chat, raw
from tilewright.serve.web.settings import ServerConfig


@pytest.fixture(scope="module")
def front() -> Iterator[Running]:
    settings = ServerConfig(
        api_key=("one", "two"),
        served_model_name=("first", "second"),
        strict_model=True,
        cors_origins=("https://friend.example",),
        admin=True,
        metrics_names="vllm",
    )
    with running_front(settings) as running:
        yield running


KEY = {"authorization": "Bearer two"}


def test_the_schema_is_of_the_types_that_are_decoded(front: Running) -> None:
    found = json.loads(front.ask("GET", "/openapi.json", **KEY)[1])
    assert found["openapi"].startswith("3.1") and "/openapi.json" in found["paths"]
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    named = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = found["components"]["schemas"][named]["properties"]
    assert {"messages", "max_tokens", "logit_bias"} <= set(fields)
    assert {"/v1/embeddings", "/v1/responses", "/v1/responses/{id}"} <= set(found["paths"])
    named = found["components"]["schemas"]
    assert "dimensions" in named["EmbeddingRequest"]["properties"]
    assert "previous_response_id" in named["ResponsesRequest"]["properties"]
    for path in set(re.findall(r"#/components/schemas/(\w+)", json.dumps(found))):
        assert path in found["components"]["schemas"]


def test_an_operator_sees_who_has_a_slot_and_forgets_prefixes(front: Running) -> None:
    with front.connect() as client:
        asked = raw(chat("S", max_tokens=4000, model="first"))
        client.sendall(asked.replace(b"\r\n", b"\r\nauthorization: Bearer one\r\n", 1))
        wait_until(lambda: json.loads(front.ask("GET", "/slots", **KEY)[1])["requests"])
        (one,) = json.loads(front.ask("GET", "/slots", **KEY)[1])["requests"]
        assert (one["prompt_tokens"], one["max_tokens"]) == (2, 4000)
    assert front.ask("POST", "/reset_prefix_cache", b"", **KEY)[0] == 200


def test_only_who_has_a_key_may_ask(front: Running) -> None:
    for path in ("/v1/models", "/props", "/metrics", "/slots", "/openapi.json"):
        status, answer, headers = front.ask("GET", path)
        assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key"
        assert headers["www-authenticate"] == "Bearer"
    for key in ("Bearer", "Bearer on", "Bearer onee", "Basic one", "Bearer tw\xf6"):
        assert front.ask("GET", "/v1/models", authorization=key)[0] == 401
    for path in ("/health", "/v1/health", "/live", "/", "/page.js", "/page.css"):
        assert front.ask("GET", path)[0] == 200


def test_models_have_the_names_given_and_say_what_they_are(front: Running) -> None:
    cards = json.loads(front.ask("GET", "/v1/models", **KEY)[1])["data"]
    assert [card["id"] for card in cards] == ["first", "second"]
    assert cards[0]["root"] == "fake" and cards[0]["max_model_len"] == 4096
    assert {"parameters", "precision", "target", "weights"} <= set(cards[0]["meta"])
    assert cards[0]["meta"]["precision"] == "stored (Q4_1, Q8_0)"
    facts = json.loads(front.ask("GET", "/props", **KEY)[1])["facts"]
    assert facts["precision"] == "{}", "the heading"
    status, answer, _ = front.post("/v1/chat/completions", chat("a", model="third"), **KEY)
    assert status == 404 and "first, second" in answer["error"]["message"]
    assert front.post("/v1/chat/completions", chat("a", model="second"), **KEY)[0] == 200


def test_props_say_slots_state_defaults_and_promises(front: Running) -> None:
    found = json.loads(front.ask("GET", "/props", **KEY)[1])
    known = {"total_slots", "max_model_len", "num_pages", "page_size", "num_snapshots", "cell"}
    known |= {
        "arithmetic",
        "invariant",
        "invariant_requests",
        "determinism",
        "chat_template",
        "limits",
    }
    assert known <= set(found)
    assert found["default_generation_settings"]["temperature"] == 0.0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://friend.example"}, 200),
        ({"Origin": "https://foe.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
        ({"Origin": "http://127.0.0.1:1", "Host": "127.0.0.1:1"}, 200),
        ({"Origin": "http://foe.example", "Host": "foe.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Host": "foe.example"}, 403),
        ({"Sec-Fetch-Site": "same-origin", "Host": "friend.example"}, 200),
        ({"Host": "a-service"}, 200),
        ({"Origin": "x", "Host": "["}, 403),
    ],
)
def test_foreign_pages_may_not_ask(front: Running, headers: dict[str, str], status: int) -> None:
    found, answer, said = front.ask("GET", "/v1/models", **KEY, **headers)
    assert found == status, answer
    if status == 403:
        assert json.loads(answer)["error"]["code"] == "origin"
    elif "friend" in headers.get("Origin", ""):
        assert said["access-control-allow-origin"] == headers["Origin"]
        refused = front.post("/v1/chat/completions", b"{", **KEY, **headers)
        assert refused[2]["access-control-allow-origin"] == headers["Origin"]
        assert front.ask("OPTIONS", "/v1/models", **headers)[0] == 204


FRIEND = {"origin": "https://friend.example"}
STAINLESS = "authorization,content-type,x-stainless-os,x-stainless-retry-count"


def methods_of(front: Running) -> set[str]:
    """The methods of all routes."""
    paths = json.loads(front.ask("GET", "/openapi.json", **KEY)[1])["paths"]
    return {method.upper() for operations in paths.values() for method in operations}


def test_preflight_headers_asked_for_are_allowed(front: Running) -> None:
    asked = {**FRIEND, "access-control-request-method": "POST"}
    for path in ("/v1/chat/completions", "/v1/models", "/nowhere"):
        headers = {**asked, "access-control-request-headers": STAINLESS + ",bad name,x\xe4"}
        status, body, found = front.ask("OPTIONS", path, **headers)
        assert (status, body) == (204, b"")
        assert found["access-control-allow-headers"].split(", ") == STAINLESS.split(",")
        methods = set(found["access-control-allow-methods"].split(", "))
        assert methods == {"HEAD", *methods_of(front)}, "those of all routes"
        assert int(found["access-control-max-age"]) > 0 and found["x-request-id"]
        assert set(found["vary"].split(", ")) == {
            *("origin", "access-control-request-method", "access-control-request-headers")
        }
    plain = front.ask("OPTIONS", "/v1/models", **asked)[2]["access-control-allow-headers"]
    assert {"authorization", "content-type"} <= set(plain.split(", "))


def test_cors_every_answer_exposes_headers(front: Running) -> None:
    body = json.dumps(chat("a", model="first")).encode()
    streamed = json.dumps(chat("a", model="first", stream=True)).encode()
    asked: list[tuple[str, str, bytes | None, dict[str, str], int]] = [
        ("GET", "/v1/models", None, KEY, 200),
        ("GET", "/v1/models", None, {}, 401),
        ("GET", "/nowhere", None, KEY, 404),
        ("DELETE", "/v1/models", None, KEY, 405),
        ("POST", "/v1/chat/completions", b"{", KEY, 400),
        ("POST", "/v1/chat/completions", body, KEY, 200),
        ("POST", "/v1/chat/completions", streamed, KEY, 200),
    ]
    for method, path, data, key, status in asked:
        found, _, headers = front.ask(method, path, data, **key, **FRIEND)
        assert found == status
        assert headers["access-control-allow-origin"] == FRIEND["origin"]
        exposed = set(headers["access-control-expose-headers"].split(", "))
        assert {"x-request-id", "retry-after", "x-ignored-fields", "allow"} <= exposed
        assert headers["vary"] == "origin"
        assert "access-control-allow-origin" not in front.ask(method, path, data, **key)[2]
        assert front.ask(method, path, data, **key)[2]["vary"] == "origin", "caches tell them apart"


def test_head_every_get_route_answers_without_a_body(front: Running) -> None:
    paths = json.loads(front.ask("GET", "/openapi.json", **KEY)[1])["paths"]
    gets = [path.replace("{id}", "first") for path, found in paths.items() if "get" in found]
    assert {"/health", "/v1/models", "/v1/models/first", "/", "/metrics", "/slots"} <= set(gets)
    for path in gets:
        status, body, headers = front.ask("GET", path, **KEY)
        found = front.ask("HEAD", path, **KEY)
        assert found[:2] == (status, b"")
        assert found[2]["content-type"] == headers["content-type"]
        if path not in ("/metrics", "/health"):
            assert found[2]["content-length"] == str(len(body))


def test_method_not_allowed_names_allow(front: Running) -> None:
    paths = json.loads(front.ask("GET", "/openapi.json", **KEY)[1])["paths"]
    for path, operations in paths.items():
        wanted = {each.upper() for each in (*operations, *(["head"] * ("get" in operations)))}
        for method in {"DELETE", "PUT", "PATCH", "OPTIONS"} - wanted:
            status, _, headers = front.ask(method, path.replace("{id}", "first"), **KEY)
            assert status == 405 and set(headers["allow"].split(", ")) == wanted, (method, path)


def test_a_machine_that_is_open_to_others_knows_its_own_names() -> None:
    from tilewright.serve.web.guard import _is_our_host

    for host in ("10.0.0.7:8000", "[::1]:8000", "localhost:8000", "box.example:8000"):
        assert _is_our_host(host, "box.example")
    assert not _is_our_host("foe.example:8000", "0.0.0.0")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/embeddings", 405, "allowed: POST"),
        ("GET", "/v1/responses", 405, "allowed: POST"),
        ("GET", "/v1/responses/none", 404, "'none' is not stored"),
        ("POST", "/v1/messages", 404, "/v1/chat/completions"),
        ("POST", "/v1/images/edits", 404, "images"),
        ("POST", "/v1/audio/speech", 404, "audio"),
        ("POST", "/v1/load_lora_adapter", 404, "adapters"),
        ("GET", "/nowhere", 404, "nothing here"),
        ("GET", "/v1/models/none", 404, "first, second"),
        ("GET", "/v1/completions", 405, "allowed: POST"),
        ("DELETE", "/health", 405, "allowed: GET"),
    ],
)
def test_what_is_not_there_says_so(
    front: Running, method: str, path: str, status: int, said: str
) -> None:
    found, answer, headers = front.ask(method, path, **KEY)
    error = json.loads(answer)["error"]
    assert found == status and said in error["message"] and headers["x-request-id"]


def test_a_request_keeps_its_name(front: Running) -> None:
    for given, keeps in (("mine-1", True), ("x" * 128, True), ("x" * 129, False), ("\xe4", False)):
        found = front.ask("GET", "/live", x_request_id=given)[2]["x-request-id"]
        assert (found == given) is keeps and found
    body = {**chat("a", model="first"), "stream": True}
    headers = front.ask(
        "POST", "/v1/chat/completions", json.dumps(body).encode(), x_request_id="s", **KEY
    )[2]
    assert headers["x-request-id"] == "s" and headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("kind", "status"),
    [("application/json", 200), ("application/json; charset=utf-8", 200), ("text/plain", 415)],
)
def test_a_body_is_json_or_of_no_kind(front: Running, kind: str, status: int) -> None:
    body = json.dumps(chat("a", model="first")).encode()
    found = front.ask("POST", "/v1/chat/completions", body, content_type=kind, **KEY)[0]
    assert found == status
    assert front.ask("POST", "/v1/chat/completions", body, **KEY)[0] == 200
    assert front.ask("POST", "/v1/chat/completions", body, content_encoding="gzip", **KEY)[0] == 415


def test_without_admin_there_are_no_slots() -> None:
    with running_front() as running:
        for method, path in (("GET", "/slots"), ("POST", "/reset_prefix_cache")):
            status, answer, _ = running.ask(method, path)
            assert status == 404 and b"--admin" in answer


BAD: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
    ({"stop": ["x" * 1001]}, "stop[0]"),
    ({"prompt": [[1, 2], ["x"]]}, "prompt[1][0]"),
    ({"prompt": [[1] * 5000]}, None),
    ({"prompt": [[256]], "echo": True}, "prompt"),
    ({"prompt": ["x"] * 65}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_p": 1.5}, "min_p"),
    ({"logprobs": 21}, "logprobs"),
    ({"stream": "yes"}, "stream"),
)


@pytest.mark.parametrize(("changes", "param"), BAD, ids=[str(at) for at in range(len(BAD))])
def test_completions_name_what_is_wrong(
    front: Running, changes: dict[str, Any], param: str | None
) -> None:
    body = {"prompt": "x", "max_tokens": 2, "model": "first", **changes}
    status, answer, _ = front.post("/v1/completions", body, **KEY)
    assert status == 400, answer
    error = answer["error"]
    assert error["param"] == param and (param or "tokens").partition("[")[0] in error["message"]


METRICS = {
    "gauge": "num_requests_running num_requests_waiting num_requests_swapped kv_cache_usage_perc "
    "snapshots_used cache_config_info",
    "counter": "prompt_tokens_total generation_tokens_total num_preemptions_total "
    "prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_cached_total "
    "request_success_total requests_refused_total tokens_dropped_total engine_restarts_total "
    "images_total image_cache_hits_total",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds "
    "request_prompt_tokens request_prefill_kv_computed_tokens request_generation_tokens "
    "request_params_max_tokens request_params_n iteration_tokens_total step_seconds host_seconds "
    "device_idle_seconds",
}


def test_metrics_have_the_names_and_labels_of_dashboards(front: Running) -> None:
    front.post("/v1/completions", {"prompt": "x", "max_tokens": 3}, x_request_id="mine", **KEY)
    front.post("/v1/completions", {"prompt": ""}, **KEY)
    text = front.ask("GET", "/metrics", **KEY)[1].decode()
    kinds = dict(re.findall(r"^# TYPE vllm:(\w+) (\w+)$", text, re.M))
    assert kinds == {name: kind for kind, names in METRICS.items() for name in names.split()}
    for line in text.splitlines():
        if not line.startswith(("#", "process_", "engine_process_")):
            assert 'engine="0"' in line and 'model_name="first"' in line, line
    assert 'requests_refused_total{code="invalid_value"' in text
    assert re.search(r'request_success_total{.*finished_reason="length".*} \d', text)
    assert 'block_size="0"' in text
    status, opened, headers = front.ask(
        "GET", "/metrics", accept="application/openmetrics-text", **KEY
    )
    assert status == 200 and "openmetrics" in headers["content-type"]
    names = [
        {re.split("[{ ]", line)[0] for line in each.splitlines() if not line.startswith("#")}
        for each in (text, opened.decode())
    ]
    assert names[0] == names[1] and any(name.startswith("vllm:") for name in names[0])
    assert b'request_id="mine"' in opened and opened.endswith(b"# EOF\n")
