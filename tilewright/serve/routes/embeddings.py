"""The embeddings endpoint: converts texts or token ids to unit vectors."""

from __future__ import annotations

import base64
import math
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from aiohttp import web
from msgspec import Meta, Struct

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.runtime.messages import EngineReady, RequestFailed, RequestFinished, RequestStarted
from tilewright.runtime.request import UNNUMBERED, EngineRequest
from tilewright.serve.api_server import ApiServer
from tilewright.serve.prompt.prepare import TokenizedPrompt, check_prompt, encode
from tilewright.serve.web.errors import invalid, unsupported
from tilewright.serve.web.http_io import (
    API_SERVER,
    CLIENT,
    Route,
    ignored_fields,
    json_response,
    read_body,
)
from tilewright.serve.web.requests import Token, TokenIds, decode, prompt_list
from tilewright.serve.web.streams import error_of

MAX_INPUTS = 2048
_AT_A_TIME = 256  # inputs queued together; more would fill the queue
_BYTES = 4
_CHARACTERS_A_VALUE = 8  # encoding a value costs as much as tokenizing these


class EmbeddingRequest(Struct, kw_only=True, frozen=True):
    """The body of ``POST /v1/embeddings``. ``pooling`` overrides ``--pooling``."""

    input: str | Annotated[list[str | TokenIds | Token], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    pooling: Literal["mean", "last"] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=1 << 31)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    user: Any = None


async def _embeddings(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    parsed, ignored = decode(await read_body(request, front), EmbeddingRequest)
    ready, _ = front.up()
    front.check_model(parsed.model, ready)
    _check(parsed, ready)
    prompts = await _prompts(front, parsed, ready)
    vectors = await _embed(front, parsed, prompts, client=request[CLIENT])
    width = parsed.dimensions or ready.hidden_size
    size = _CHARACTERS_A_VALUE * width * len(vectors)
    spelled = await front.aside(size, _spell, vectors, width, parsed.encoding_format == "base64")
    count = sum(len(prompt.tokens) for prompt in prompts)
    body = {
        "object": "list",
        "data": spelled,
        "model": front.names(ready)[0],
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    return await front.aside(size, json_response, body, headers=ignored_fields(ignored))


def _check(parsed: EmbeddingRequest, ready: EngineReady) -> None:
    """Raise an ApiError with status 400 if the target cannot serve the request."""
    if not ready.hidden_size:
        target = ready.facts.get("target", "of this server")
        said = f"target {target} gives no hidden states; allowed: cpu, cuda, reference"
        raise unsupported("embeddings", said)
    if (parsed.dimensions or 0) > ready.hidden_size:
        said = f"dimensions: {parsed.dimensions}; allowed: 1 to {ready.hidden_size}"
        raise invalid(said, "dimensions")


async def _prompts(
    front: ApiServer, parsed: EmbeddingRequest, ready: EngineReady
) -> list[TokenizedPrompt]:
    """Return a prompt for each input. Raise an ApiError with status 400 for bad input."""
    _, coder = front.up()
    inputs = prompt_list(parsed.input, "input", MAX_INPUTS)
    prompts = []
    for at, text in enumerate(inputs):
        where = f"input[{at}]" if len(inputs) > 1 else "input"
        if not text:
            raise invalid(f"{where}: empty; allowed: a text, or a list of token ids", where)
        if isinstance(text, str):
            prompt = await front.aside(len(text), encode, coder, text, ready, add_special=True)
        else:
            prompt = TokenizedPrompt("", tuple(text))
        if len(prompt.tokens) > ready.max_positions:
            said = f"{where}: {len(prompt.tokens)} tokens; allowed: up to {ready.max_positions}"
            raise invalid(said, where, "context_length_exceeded")
        check_prompt(prompt, ready, where)
        prompts.append(prompt)
    return prompts


async def _embed(
    front: ApiServer, parsed: EmbeddingRequest, prompts: Sequence[TokenizedPrompt], *, client: str
) -> list[bytes]:
    """Return a little-endian float32 vector for each prompt, computed in groups."""
    vectors = []
    count = min(_AT_A_TIME, front.settings.max_queue)
    for first in range(0, len(prompts), count):
        vectors += await _embed_together(front, parsed, prompts[first : first + count], client)
    return vectors


async def _embed_together(
    front: ApiServer, parsed: EmbeddingRequest, prompts: Sequence[TokenizedPrompt], client: str
) -> list[bytes]:
    began = time.perf_counter()
    handle = front.client.submit(
        [
            EngineRequest(
                UNNUMBERED,
                prompt.tokens,
                SamplingParams(max_tokens=1),
                priority=parsed.priority or 0,
                cache_salt=parsed.cache_salt or "",
                pooling=parsed.pooling or front.settings.pooling,
            )
            for prompt in prompts
        ],
        client=client,
    )
    vectors: dict[int, bytes] = {}
    started: dict[int, RequestStarted] = {}
    try:
        while len(vectors) < len(prompts):
            for index, message in await handle.take():
                if isinstance(message, RequestFailed):
                    raise error_of(message)
                if isinstance(message, RequestStarted):
                    started.setdefault(index, message)
                elif isinstance(message, RequestFinished):
                    vectors[index] = message.vector
                    metrics = front.metrics.of(handle.engines.get(index, 0))
                    metrics.take_vector(
                        len(prompts[index].tokens),
                        started.get(index),
                        message,
                        seconds=time.perf_counter() - began,
                    )
    finally:
        handle.close()
    return [vectors[index] for index in range(len(prompts))]


def _spell(vectors: Sequence[bytes], width: int, is_base64: bool) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "index": index, "embedding": _values(vector, width, is_base64)}
        for index, vector in enumerate(vectors)
    ]


def _values(vector: bytes, width: int, is_base64: bool) -> str | list[float]:
    """Return the first ``width`` values, normalized again."""
    if _BYTES * width < len(vector):
        kept = array("f", vector[: _BYTES * width])
        length = math.sqrt(math.fsum(value * value for value in kept))
        vector = array("f", [value / length if length else value for value in kept]).tobytes()
    if is_base64:
        return base64.b64encode(vector).decode()
    return array("f", vector).tolist()


ROUTES: list[Route] = [("POST", "/v1/embeddings", _embeddings)]
