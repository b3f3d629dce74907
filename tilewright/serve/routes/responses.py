"""Routes of the Responses API: items, typed events, and stored responses."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from tilewright.serve.api_server import ApiServer
from tilewright.serve.responses.answer import ResponseSpelling
from tilewright.serve.responses.items import Item, items_of
from tilewright.serve.responses.request import ResponsesRequest, chat_of, check_responses
from tilewright.serve.responses.store import Stored
from tilewright.serve.web.errors import ApiError, invalid
from tilewright.serve.web.http_io import (
    API_SERVER,
    CLIENT,
    Route,
    ignored_fields,
    json_response,
    read_body,
)
from tilewright.serve.web.requests import decode
from tilewright.serve.web.responses import CompletionTask
from tilewright.serve.web.streams import answer

_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of a chat, as a request for a response has them."""
_FUNCTIONS = ("tools[", "tool_choice.")
_MOST_LISTED, _LISTED = 100, 20


async def _create(request: web.Request) -> web.StreamResponse:
    front = request.app[API_SERVER]
    parsed, ignored = decode(await read_body(request, front), ResponsesRequest)
    job, spelling = await begin_response(front, parsed, request[CLIENT])
    return await answer(request, job, spelling, ignored_fields(ignored))


async def begin_response(
    front: ApiServer, parsed: ResponsesRequest, client: str
) -> tuple[CompletionTask, ResponseSpelling]:
    """Return the job and the spelling of a response, or raise ApiError."""
    check_responses(parsed)
    front.up()
    before: list[Item] = []
    if parsed.previous_response_id is not None:
        previous = front.responses.find(client, parsed.previous_response_id)
        if previous is None:
            name = "previous_response_id"
            said = f"{name}: {parsed.previous_response_id!r} is not stored; allowed: a stored one"
            raise invalid(said, name, "previous_response_not_found")
        before = previous.conversation
    items = items_of(parsed.input)
    try:
        job = await front.chat_job(chat_of(parsed, [*before, *items]))
    except ApiError as error:
        raise _renamed(error) from None
    job.client = client
    keep = partial(front.responses.add, client, given=items, before=before)
    on_end = keep if parsed.is_stored else lambda body: None
    return job, ResponseSpelling(job, parsed, on_end=on_end)


def _renamed(error: ApiError) -> ApiError:
    """Return a chat error with the field name of the Responses request."""
    for name, own in _NAMES.items():
        if error.param is not None and error.param.startswith(name):
            error.param = own
            if error.message.startswith(name):
                error.message = own + error.message.removeprefix(name)
    if error.param is not None and error.param.startswith(_FUNCTIONS):
        own = error.param.replace(".function", "", 1)  # functions of responses are not nested
        if error.message.startswith(error.param):
            error.message = own + error.message.removeprefix(error.param)
        error.param = own
    return error


async def _retrieve(request: web.Request) -> web.Response:
    return json_response(_stored(request).body)


async def _delete(request: web.Request) -> web.Response:
    response_id = _stored(request).body["id"]
    request.app[API_SERVER].responses.remove(request[CLIENT], response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def _input_items(request: web.Request) -> web.Response:
    stored = _stored(request)
    items = [*stored.before, *stored.given]
    order, limit = request.query.get("order", "desc"), request.query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise invalid(f"order: {order[:100]!r}; allowed: asc, desc", "order")
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit[:9]) <= _MOST_LISTED):
        raise invalid(f"limit: {limit[:100]!r}; allowed: 1 to {_MOST_LISTED}", "limit")
    if order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    after = request.query.get("after")
    if after is not None and after not in ids:
        raise invalid(f"after: {after[:100]!r}; allowed: an item's id", "after")
    first = ids.index(after) + 1 if after is not None else 0
    listed = items[first : first + int(limit)]
    body: dict[str, Any] = {"object": "list", "data": listed}
    body |= {"first_id": listed[0]["id"], "last_id": listed[-1]["id"]} if listed else {}
    return json_response({**body, "has_more": first + len(listed) < len(items)})


def _stored(request: web.Request) -> Stored:
    """Return the response named in the path. Raise ApiError 404 for an unknown name."""
    response_id = request.match_info["id"]
    stored = request.app[API_SERVER].responses.find(request[CLIENT], response_id)
    if stored is None:
        said = f"response {response_id[:100]!r} is not stored"
        raise ApiError(404, "not_found", said, param="id")
    return stored


ROUTES: list[Route] = [
    ("POST", "/v1/responses", _create),
    ("GET", "/v1/responses/{id}", _retrieve),
    ("DELETE", "/v1/responses/{id}", _delete),
    ("GET", "/v1/responses/{id}/input_items", _input_items),
]
