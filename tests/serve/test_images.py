"""Images in chats of a real server: tokens, usage, caches, and faults in a line each."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tests.images.test_decode import FAULTS, encoded
from tests.images.test_vision_models import chat_of, picture
from tests.images.tiny_gemma import save_gemma, tiny_gemma
from tests.images.tiny_vl import save_vl, tiny_vl
from tests.serve.conftest import Server, Start, post
from tilewright import LLM
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.images.processor import PreparedImage
from tilewright.images.prompt import PromptImage
from tilewright.runtime.request import EngineRequest
from tilewright.serve.engines import request_tracker
from tilewright.serve.engines.request_tracker import RequestTracker
from tilewright.serve.engines.routing import ReplicaRouter
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import ServerConfig

CHAT = "/v1/chat/completions"
BEFORE, AFTER = "what is on this image, and where?", "?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vl(tiny_vl(), tmp_path_factory.mktemp("vl") / "tiny")


@pytest.fixture(scope="module")
def vision(start_server: Start, folder: Path) -> Server:
    options = ("--target", "reference", "--precision", "reference", "--max-num-seqs", "3")
    hosts = ("--allowed-media-domains", "127.0.0.1")
    found = start_server(*options, *hosts, "--max-model-len", "256", model=folder)
    assert found.process.poll() is None, found.log.read_text()
    return found


def url(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    text = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": text}}


def png(size: tuple[int, int] = (24, 40), seed: int = 0) -> bytes:
    import io

    out = io.BytesIO()
    picture(*size, seed).save(out, "PNG")
    return out.getvalue()


def asked(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {
        "messages": [{"role": "user", "content": content}],
        **{"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "temperature": 0},
    }


def test_chat_with_an_image_gives_the_tokens_of_the_library(vision: Server, folder: Path) -> None:
    with LLM(folder, target="reference", precision="reference", use_cache=False) as llm:
        chat = chat_of(BEFORE, picture(24, 40), AFTER)
        answer = llm.chat(chat, max_tokens=6, stop_token_ids=())
        blank = llm.chat(chat_of(BEFORE, picture(24, 40, 5), AFTER), max_tokens=6)
    assert answer.tokens != blank.tokens
    before = vision.gauge("images_total"), vision.gauge("image_cache_hits_total")
    body = asked(BEFORE, url(png()), AFTER)
    for _ in range(2):  # the second from the caches
        status, found = post(vision, CHAT, body)
        assert status == 200, found
        assert found["choices"][0]["token_ids"] == list(answer.tokens)
        assert found["usage"]["prompt_tokens"] == answer.num_prompt_tokens
        assert found["usage"]["prompt_tokens_details"]["image_tokens"] == 15
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    status, found = post(vision, CHAT, asked(BEFORE, url(png(seed=5)), AFTER))
    assert found["choices"][0]["token_ids"] == list(blank.tokens)
    status, found = post(vision, "/tokenize", {"messages": body["messages"]})
    assert found["count"] == answer.num_prompt_tokens
    vision.wait_until(lambda: vision.gauge("images_total") == before[0] + 3)
    assert vision.gauge("image_cache_hits_total") == before[1] + 1


def test_responses_take_images(vision: Server) -> None:
    _, found = post(vision, CHAT, asked(BEFORE, url(png()), AFTER))
    image = {"type": "input_image", "image_url": url(png())["image_url"]["url"]}
    content = [{"type": "input_text", "text": BEFORE}, image, {"type": "input_text", "text": AFTER}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 6}
    status, answer = post(vision, "/v1/responses", {**body, "temperature": 0})
    assert status == 200, answer
    assert answer["usage"]["input_tokens"] == found["usage"]["prompt_tokens"]
    follow_up = {"input": "and?", "previous_response_id": answer["id"], "max_output_tokens": 2}
    status, later = post(vision, "/v1/responses", follow_up)
    assert status == 200, later
    del image["image_url"]
    status, found = post(vision, "/v1/responses", body)
    assert status == 400 and "input_image without image_url" in found["error"]["message"]


def test_props_name_the_modalities_and_limits(vision: Server) -> None:
    props = vision.get("/props")
    assert props["modalities"] == ["text", "image"]
    assert props["limits"]["max_images"] == 4 and props["limits"]["max_body"] == 32 << 20
    assert vision.get("/v1/models")["data"][0]["meta"]["modalities"] == ["text", "image"]


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_image_is_refused_in_a_line(name: str, vision: Server) -> None:
    data, kind, _ = FAULTS[name]
    status, found = post(vision, CHAT, asked(url(data, kind)))
    assert status == 400, found
    assert found["error"]["code"] == "invalid_image" and "\n" not in found["error"]["message"]
    assert vision.is_healthy()


def test_bombs_leave_the_memory_of_the_server_bounded(vision: Server) -> None:
    """A decoded bomb takes 243 MB, and 10.8 GB without the limit."""

    process = Path(f"/proc/{vision.process.pid}")

    def resident() -> int:
        status = (process / "status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    assert post(vision, CHAT, asked(url(png((1500, 1500)))))[0] == 200
    (process / "clear_refs").write_text("5")  # earlier tests decode bombs: begin a new peak
    before = resident()
    for name in ("bomb", "large_header", "strip", "short_data", "truncated") * 2:
        data, kind, _ = FAULTS[name]
        assert post(vision, CHAT, asked(*[url(data, kind)] * 4))[0] == 400
    assert resident() - before < 64 << 20


@pytest.mark.parametrize(
    ("part", "count", "code"),
    [
        (url(encoded()), 5, "too_many_images"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}, 1, "unsupported"),
        ({"type": "image_url", "image_url": {"url": "http://example.org/a"}}, 1, "unsupported"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 1, "unsupported"),
        ({"type": "image", "image": "/etc/passwd"}, 1, "invalid_image"),
        ({"type": "video_url", "video_url": {"url": "x"}}, 1, "invalid_value"),
    ],
)
def test_an_image_that_is_not_allowed_is_refused(
    part: Any, count: int, code: str, vision: Server
) -> None:
    status, found = post(vision, CHAT, asked(*[part] * count))
    assert (status, found["error"]["code"]) == (400, code), found


def test_detail_low_needs_no_more_tokens_and_bodies_are_bounded(vision: Server) -> None:
    low = url(png((200, 200)))
    low["image_url"]["detail"] = "low"
    counts = [post(vision, CHAT, asked(part))[1]["usage"] for part in (low, url(png((200, 200))))]
    assert counts[0]["prompt_tokens"] <= counts[1]["prompt_tokens"]
    huge = json.dumps(asked("a" * (33 << 20))).encode()
    status, body, _ = vision.ask("POST", CHAT, huge, content_type="application/json")
    assert status == 413, body[:200]


def test_a_model_without_a_tower_refuses_images(server: Server) -> None:
    status, found = post(server, CHAT, asked(url(encoded())))
    assert (status, found["error"]["code"]) == (400, "unsupported")
    assert "this model and target take no images" in found["error"]["message"]


def test_waiting_images_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_tracker, "_MAX_IMAGE_BYTES", 100)
    tracker = RequestTracker(lambda _: 0, lambda *_: None, ReplicaRouter(1), ServerConfig())
    image = PromptImage(0, PreparedImage(1, 1, 1, 1, b"", bytes(60)))
    message = EngineRequest(1, (5, 6), SamplingParams(), images=(image,))
    tracker._check_room([message], 4096)
    tracker._count(message, 1)
    with pytest.raises(ApiError, match="wait already"):
        tracker._check_room([message], 4096)
    tracker._count(message, -1)
    tracker._check_room([message, message], 4096)  # an empty queue takes all requests


def test_gemma_chat_gives_the_tokens_of_the_library(start_server: Start, tmp_path: Path) -> None:
    """The placeholder replaces the template's marker before tokenization."""
    folder = save_gemma(tiny_gemma(), tmp_path / "tiny")
    with LLM(folder, target="reference", precision="reference", use_cache=False) as llm:
        answer = llm.chat(chat_of(BEFORE, picture(24, 40), AFTER), max_tokens=6, stop_token_ids=())
    options = ("--target", "reference", "--precision", "reference", "--max-num-seqs", "2")
    server = start_server(*options, "--max-model-len", "256", model=folder)
    status, found = post(server, CHAT, asked(BEFORE, url(png()), AFTER))
    assert status == 200, found
    assert found["choices"][0]["token_ids"] == list(answer.tokens)
    assert found["usage"]["prompt_tokens_details"]["image_tokens"] == 16
    status, found = post(server, CHAT, asked("<start_of_image>", url(png())))
    assert (status, found["error"]["code"]) == (400, "invalid_image")
