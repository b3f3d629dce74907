"""Texts to tokens and back, and a chat's text."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

from tilewright.errors import RequestError
from tilewright.serve.output.choice import token_text
from tilewright.serve.prompt.prepare import TokenizedPrompt, encode
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.tools.tool_request import read_tools
from tilewright.serve.web.errors import invalid, refuse
from tilewright.serve.web.http_io import API_SERVER, Route, json_response, read_body
from tilewright.serve.web.requests import (
    DetokenizeRequest,
    TemplateRequest,
    TokenizeRequest,
    decode,
)


async def _tokenize(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    body, _ = decode(await read_body(request, front), TokenizeRequest)
    ready, coder = front.up()
    add_special = bool(body.add_special_tokens or body.add_special)
    prompt: TokenizedPrompt | None = None
    text = ""
    if body.messages is not None and not add_special:
        prompt = await front.chat_prompt(body, read_tools(body.tools))
    elif body.messages is not None:
        text = await front.render(body, read_tools(body.tools))
    elif (found := body.prompt if body.prompt is not None else body.content) is not None:
        text = found
        if body.prompt is not None and body.add_special_tokens is None:
            add_special = True  # as completions do, and as vLLM's default is
    else:
        raise invalid("no text; allowed: prompt, messages or content")
    if prompt is None:
        prompt = await front.aside(len(text), encode, coder, text, ready, add_special=add_special)
    tokens = list(prompt.tokens)
    pieces: list[str] = []
    if body.with_pieces or body.return_token_strs:
        pieces = await front.aside(len(tokens), _pieces, coder, tokens)
    if body.content is not None:
        pairs = [{"id": t, "piece": p} for t, p in zip(tokens, pieces, strict=False)]
        return json_response({"tokens": pairs if body.with_pieces else tokens})
    said = {"count": len(tokens), "max_model_len": ready.max_positions, "tokens": tokens}
    return json_response({**said, "token_strs": pieces} if body.return_token_strs else said)


def _pieces(coder: TextCoder, tokens: Sequence[int]) -> list[str]:
    return [token_text(coder, token) for token in tokens]


async def _detokenize(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    body, _ = decode(await read_body(request, front), DetokenizeRequest)
    _, coder = front.up()
    try:
        text = await front.aside(len(body.tokens), coder.decode, body.tokens, False)
    except RequestError as error:
        raise refuse(error, param="tokens") from None
    return json_response({"prompt": text, "content": text})


async def _apply_template(request: web.Request) -> web.Response:
    front = request.app[API_SERVER]
    body, _ = decode(await read_body(request, front), TemplateRequest)
    text = await front.render(body, read_tools(body.tools))
    return json_response({"prompt": text})


ROUTES: list[Route] = [
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("POST", "/apply-template", _apply_template),
]
