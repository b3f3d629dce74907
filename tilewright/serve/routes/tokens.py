"""Texts to tokens and back, and the text of a chat."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from tilewright.errors import RequestError
from tilewright.serve.output.choice import token_text
from tilewright.serve.prompt.prepare import encode
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.asked import read_tools
from tilewright.serve.web.errors import invalid, refuse
from tilewright.serve.web.http_io import FRONT, Route, json_response, read_body
from tilewright.serve.web.requests import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    decode,
)


async def _tokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    asked, _ = decode(await read_body(request, front), TokenizeRequest)
    ready, coder = front.up()
    add_special = bool(asked.add_special_tokens or asked.add_special)
    if asked.messages is not None:
        text = await front.render(asked, read_tools(asked.tools))
    elif (found := asked.prompt if asked.prompt is not None else asked.content) is not None:
        text = found
        if asked.prompt is not None and asked.add_special_tokens is None:
            add_special = True  # as completions do, and as vLLM's default is
    else:
        raise invalid("no text; allowed: prompt, messages or content")
    prompt = await front.aside(len(text), encode, coder, text, ready, add_special=add_special)
    tokens = list(prompt.tokens)
    pieces: list[str] = []
    if asked.with_pieces or asked.return_token_strs:
        pieces = await front.aside(len(tokens), _pieces, coder, tokens)
    if asked.content is not None:
        pairs = [{"id": t, "piece": p} for t, p in zip(tokens, pieces, strict=False)]
        return json_response({"tokens": pairs if asked.with_pieces else tokens})
    said = {"count": len(tokens), "max_model_len": ready.max_positions, "tokens": tokens}
    return json_response({**said, "token_strs": pieces} if asked.return_token_strs else said)


def _pieces(coder: TextCoder, tokens: Sequence[int]) -> list[str]:
    return [token_text(coder, token) for token in tokens]


async def _detokenize(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    asked, _ = decode(await read_body(request, front), DetokenizeRequest)
    _, coder = front.up()
    try:
        text = await front.aside(len(asked.tokens), coder.decode, asked.tokens, False)
    except RequestError as error:
        raise refuse(error, param="tokens") from None
    return json_response({"prompt": text, "content": text})


async def _apply_template(request: web.Request) -> web.Response:
    front = request.app[FRONT]
    asked, _ = decode(await read_body(request, front), TemplateRequest)
    text = await front.render(asked, read_tools(asked.tools))
    return json_response({"prompt": text})


ROUTES: list[Route] = [
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("POST", "/apply-template", _apply_template),
]
