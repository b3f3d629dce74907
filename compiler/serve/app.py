"""The HTTP face: which path is answered by what, keys, errors, limits."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import sys
import traceback
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from tilewright.compiler import __version__
from tilewright.compiler.errors import RequestError
from tilewright.compiler.serve.answers import token_text
from tilewright.compiler.serve.errors import ApiError, invalid, refuse
from tilewright.compiler.serve.forms import Job
from tilewright.compiler.serve.front import Front
from tilewright.compiler.serve.prepare import encode, render_chat
from tilewright.compiler.serve.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    decode,
)
from tilewright.compiler.serve.settings import MAX_BODY
from tilewright.compiler.serve.streams import Follower, answer_stream, answer_whole

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_FRONT = web.AppKey("front", Front)
_OPEN = ("/", "/health", "/v1/health", "/live", "/page.css", "/page.js")
_PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css")}
_PAGE["/page.js"] = ("page.js", "text/javascript")
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NOT_HERE = {
    "/v1/embeddings": "embeddings are not computed",
    "/v1/responses": "chats are asked for at /v1/chat/completions",
    "/v1/messages": "chats are asked for at /v1/chat/completions",
    "/v1/images/generations": "images are not made",
    "/v1/audio/transcriptions": "audio is not read",
}


def make_app(front: Front) -> web.Application:
    """The application; ``front`` is started and ended by who makes it."""
    app = web.Application(middlewares=[_guard], client_max_size=MAX_BODY)
    app[_FRONT] = front
    routes: list[tuple[str, str, Handler]] = [
        *(("GET", path, _page) for path in _PAGE),
        ("GET", "/health", _health),
        ("GET", "/v1/health", _health),
        ("GET", "/live", _live),
        ("GET", "/version", _version),
        ("GET", "/metrics", _metrics),
        ("GET", "/props", _props),
        ("GET", "/tokenizer_info", _tokenizer_info),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{id:.+}", _model),
        ("POST", "/v1/chat/completions", _chat),
        ("POST", "/v1/completions", _completions),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("POST", "/apply-template", _apply_template),
    ]
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    return app


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Names every request, checks who asks, and makes every error one of the API's."""
    front = request.app[_FRONT]
    request["id"] = _request_id(request)
    try:
        allowed_origin = _check_origin(request, front)
        if request.method == "OPTIONS" and allowed_origin:
            return _preflight(allowed_origin)
        _check_key(request, front)
        response = await handler(request)
        if allowed_origin and not response.prepared:
            response.headers["access-control-allow-origin"] = allowed_origin
    except ApiError as error:
        response = _refusal(front, error)
    except web.HTTPRequestEntityTooLarge:
        response = _refusal(front, _too_large())
    except web.HTTPException as error:
        response = _refusal(front, _missing(request, error))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        traceback.print_exception(error, file=sys.stderr)
        response = _refusal(front, ApiError(500, "internal_error", "the server has a fault"))
    if not response.prepared:
        response.headers["x-request-id"] = request["id"]
    return response


def _request_id(request: web.Request) -> str:
    given = request.headers.get("x-request-id", "")
    is_good = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
    return given if is_good else secrets.token_hex(16)


def _refusal(front: Front, error: ApiError) -> web.Response:
    front.metrics.refuse(error.code)
    response = web.Response(
        status=error.status,
        body=error.body(),
        content_type="application/json",
        headers=error.headers,
    )
    if error.closes:
        response.force_close()
    return response


def _too_large() -> ApiError:
    said = f"the body is too large; allowed: {MAX_BODY} bytes"
    return ApiError(413, "too_large", said, closes=True)


def _missing(request: web.Request, error: web.HTTPException) -> ApiError:
    path = request.path[:200]
    if error.status == 405:
        said = f"{request.method} {path}; allowed: {error.headers.get('allow', '')}"
        return ApiError(405, "method_not_allowed", said)
    if path in _NOT_HERE:
        return ApiError(404, "not_found", f"{path}: {_NOT_HERE[path]}")
    if error.status == 404:
        return ApiError(404, "not_found", f"{path}: there is nothing here")
    return ApiError(error.status, "invalid_request", error.reason)


def _check_key(request: web.Request, front: Front) -> None:
    keys = front.settings.api_keys
    if not keys or request.path in _OPEN:
        return
    given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
    fits = [hmac.compare_digest(given, f"Bearer {key}".encode()) for key in keys]
    if not any(fits):
        said = "authorization: not a key of this server; allowed: Bearer and one of its keys"
        raise ApiError(401, "invalid_api_key", said, headers={"www-authenticate": "Bearer"})


def _check_origin(request: web.Request, front: Front) -> str:
    """The foreign origin that may ask; empty where a page of this server asks, or no browser."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    is_browser = origin is not None or "sec-fetch-site" in request.headers
    if is_browser and _is_loopback(front.settings.host):
        name = urlsplit(f"//{host}").hostname or ""
        if not _is_loopback(name) and f"http://{host}" not in front.settings.cors_origins:
            raise ApiError(403, "origin", f"host {host[:100]!r}; allowed: this machine's own")
    if origin is None or urlsplit(origin).netloc == host:
        return ""
    if origin in front.settings.cors_origins or "*" in front.settings.cors_origins:
        return origin
    said = f"origin {origin[:100]!r}; allowed: this server's own page and --cors-origins"
    raise ApiError(403, "origin", said)


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _preflight(origin: str) -> web.Response:
    headers = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": "GET, POST",
        "access-control-allow-headers": "authorization, content-type, x-request-id",
        "access-control-max-age": "600",
    }
    return web.Response(status=204, headers=headers)


async def _body(request: web.Request, front: Front) -> bytes:
    """The bytes of a JSON body, within the limits.

    Raises:
        ApiError: 413, 415, or 408 for one that takes too long.
    """
    if request.content_length is not None and request.content_length > MAX_BODY:
        raise _too_large()
    kind = request.headers.get("content-type")
    if kind is not None and request.content_type != "application/json":
        said = f"content-type {kind[:100]!r}; allowed: application/json"
        raise ApiError(415, "unsupported_media_type", said, closes=True)
    if request.headers.get("content-encoding", "identity") != "identity":
        said = "content-encoding: allowed: none"
        raise ApiError(415, "unsupported_media_type", said, closes=True)
    try:
        async with asyncio.timeout(front.settings.body_timeout):
            return await request.read()
    except TimeoutError:
        seconds = front.settings.body_timeout
        said = f"the body took longer than {seconds:g} s"
        raise ApiError(408, "timeout", said, closes=True) from None


def _json(body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return web.Response(status=status, body=data, content_type="application/json", headers=headers)


async def _page(request: web.Request) -> web.Response:
    name, kind = _PAGE[request.path]
    data = files("tilewright.compiler.serve").joinpath("page", name).read_bytes()
    headers = {"content-security-policy": _CSP, "x-content-type-options": "nosniff"}
    headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}
    return web.Response(body=data, content_type=kind, charset="utf-8", headers=headers)


async def _health(request: web.Request) -> web.Response:
    state = request.app[_FRONT].health()
    if state == "ok":
        return _json({"status": "ok"})
    return _json({"status": state}, status=503, headers={"retry-after": "5"})


async def _live(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def _version(request: web.Request) -> web.Response:
    return _json({"version": __version__})


async def _metrics(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    client = front.client
    data = front.metrics.render(client.ready, client.beat, client.num_restarts)
    return web.Response(body=data, headers={"content-type": "text/plain; version=0.0.4"})


async def _models(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    ready, _ = front.up()
    return _json({"object": "list", "data": [_card(front, name) for name in front.names(ready)]})


async def _model(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    ready, _ = front.up()
    name = request.match_info["id"]
    if name not in front.names(ready):
        known = ", ".join(front.names(ready))
        said = f"model {name[:100]!r}; allowed: {known}"
        raise ApiError(404, "model_not_found", said, param="model")
    return _json(_card(front, name))


def _card(front: Front, name: str) -> dict[str, Any]:
    ready, _ = front.up()
    facts = {key: ready.facts.get(key) for key in ("precision", "target", "weights", "device")}
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "tilewright",
        "root": ready.facts.get("name"),
        "max_model_len": ready.max_positions,
        "meta": facts,
    }


async def _props(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    ready, coder = front.up()
    defaults = {"temperature": 0.0, "top_p": 1.0, **front.settings.defaults}
    return _json(
        {
            "model": front.names(ready)[0],
            "system_fingerprint": front.fingerprint,
            "total_slots": ready.max_seats,
            "max_model_len": ready.max_positions,
            "num_pages": ready.num_pages,
            "page_size": ready.page_size,
            "invariant": ready.invariant,
            "facts": ready.facts,
            "chat_template": coder.chat_template,
            "template_variables": dict(front.settings.template_variables),
            "default_generation_settings": defaults,
            "limits": {"max_body": MAX_BODY, "max_queue": front.settings.max_queue},
        }
    )


async def _tokenizer_info(request: web.Request) -> web.Response:
    _, coder = request.app[_FRONT].up()
    ends = [token_text(coder, token) for token in coder.eos_ids]
    return _json(
        {
            "eos_token": ends[0] if ends else None,
            "eos_token_ids": coder.eos_ids,
            "bos_token": None if coder.bos_id is None else token_text(coder, coder.bos_id),
            "vocab_size": coder.vocab_size,
            "chat_template": coder.chat_template,
        }
    )


async def _chat(request: web.Request) -> web.StreamResponse:
    front = request.app[_FRONT]
    body = await _body(request, front)
    asked, ignored = decode(body, ChatRequest)
    return await _answer(request, front, await front.chat_job(asked), ignored)


async def _completions(request: web.Request) -> web.StreamResponse:
    front = request.app[_FRONT]
    body = await _body(request, front)
    asked, ignored = decode(body, CompletionRequest)
    return await _answer(request, front, await front.completion_job(asked), ignored)


async def _answer(
    request: web.Request, front: Front, job: Job, ignored: list[str]
) -> web.StreamResponse:
    headers = {}
    if ignored:
        names = [key if key.isascii() and key.isprintable() else "?" for key in ignored]
        headers["x-ignored-fields"] = ", ".join(names)[:1000]
    follower = Follower(job, front.client, front.metrics)
    if job.streams:
        headers["x-request-id"] = request["id"]
        return await answer_stream(request, job, follower, front.settings, headers)
    return _json(await answer_whole(job, follower), headers=headers)


async def _tokenize(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    asked, _ = decode(await _body(request, front), TokenizeRequest)
    ready, coder = front.up()
    add_special = bool(asked.add_special_tokens or asked.add_special)
    if asked.messages is not None:
        opens = asked.add_generation_prompt is not False
        variables = {**front.settings.template_variables, **(asked.chat_template_kwargs or {})}
        text = await front.in_thread(
            render_chat, coder, asked.messages, tools=asked.tools, variables=variables, opens=opens
        )
    elif (found := asked.prompt if asked.prompt is not None else asked.content) is not None:
        text = found
        if asked.prompt is not None and asked.add_special_tokens is None:
            add_special = True  # as completions do, and as vLLM's default is
    else:
        raise invalid("no text; allowed: prompt, messages or content")
    prompt = await front.aside(len(text), encode, coder, text, ready, add_special=add_special)
    tokens = list(prompt.tokens)
    pieces = [token_text(coder, token) for token in tokens]
    if asked.content is not None:
        pairs = [{"id": t, "piece": p} for t, p in zip(tokens, pieces, strict=True)]
        return _json({"tokens": pairs if asked.with_pieces else tokens})
    said = {"count": len(tokens), "max_model_len": ready.max_positions, "tokens": tokens}
    return _json({**said, "token_strs": pieces} if asked.return_token_strs else said)


async def _detokenize(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    asked, _ = decode(await _body(request, front), DetokenizeRequest)
    _, coder = front.up()
    try:
        text = await front.aside(len(asked.tokens), coder.decode, asked.tokens, False)
    except RequestError as error:
        raise refuse(error, param="tokens") from None
    return _json({"prompt": text, "content": text})


async def _apply_template(request: web.Request) -> web.Response:
    front = request.app[_FRONT]
    asked, _ = decode(await _body(request, front), TemplateRequest)
    _, coder = front.up()
    text = await front.in_thread(
        render_chat,
        coder,
        asked.messages,
        tools=asked.tools,
        variables={**front.settings.template_variables, **(asked.chat_template_kwargs or {})},
        opens=asked.add_generation_prompt is not False,
    )
    return _json({"prompt": text})
