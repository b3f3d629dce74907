"""Structured output: reads a request's grammar, and compiles it before the engine does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec

from tilewright.errors import ConfigError, RequestError
from tilewright.runtime.grammar.matchers import Grammars, roomy_threads
from tilewright.runtime.grammar.spec import CHOICE, JSON_SCHEMA, LARK, REGEX, GrammarSpec
from tilewright.serve.output.reasoning import CLOSE, OPEN, begins_in_reasoning
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.web.errors import ApiError, invalid
from tilewright.serve.web.requests import Common, ResponseFormat, StructuredOutputs

SECONDS = 5.0
"""Maximum seconds for the compilation of a grammar."""

_NUM_THREADS = 2
_ANY_OBJECT = '{"type": "object"}'


def read_grammar(request: Common) -> tuple[GrammarSpec, str] | None:
    """Return the grammar of an answer and its field's name. None: any text.

    Raises:
        ApiError: 400 for two grammars or an invalid grammar.
    """
    form, outputs = request.response_format, request.structured_outputs
    from_form = None if form is None or form.type == "text" else _of_format(form)
    if outputs is None:
        return from_form
    if from_form is not None:
        raise invalid("structured_outputs: only without response_format", "structured_outputs")
    return _of_outputs(outputs)


def _of_format(form: ResponseFormat) -> tuple[GrammarSpec, str]:
    if form.type == "json_object":
        param = "response_format.schema"
        text = _ANY_OBJECT if _is_null(form.schema) else _schema(form.schema, param)
    else:
        param = "response_format.json_schema.schema"
        if form.json_schema is None or _is_null(form.json_schema.schema):
            raise invalid(f"{param}: missing; allowed: a JSON schema", param)
        text = _schema(form.json_schema.schema, param)
    return GrammarSpec(kind=JSON_SCHEMA, text=text), param


def _of_outputs(outputs: StructuredOutputs) -> tuple[GrammarSpec, str]:
    names = ("json_object", "regex", "choice", "grammar")
    requested = [name for name in names if getattr(outputs, name) not in (None, False)]
    requested += [] if _is_null(outputs.json) else ["json"]
    if len(requested) != 1:
        said = f"{', '.join(requested) or 'nothing'}; allowed: one of json, {', '.join(names)}"
        raise invalid(f"structured_outputs: {said}", "structured_outputs")
    param = f"structured_outputs.{requested[0]}"
    if requested == ["json"]:
        return GrammarSpec(kind=JSON_SCHEMA, text=_schema(outputs.json, param)), param
    if outputs.regex is not None:
        return GrammarSpec(kind=REGEX, text=outputs.regex), param
    if outputs.choice is not None:
        listed = msgspec.json.encode(outputs.choice).decode()
        return GrammarSpec(kind=CHOICE, text=listed), param
    if outputs.grammar is not None:
        return GrammarSpec(kind=LARK, text=outputs.grammar), param
    return GrammarSpec(kind=JSON_SCHEMA, text=_ANY_OBJECT), param


def _is_null(raw: msgspec.Raw) -> bool:
    return bytes(raw) == b"null"


def _schema(raw: msgspec.Raw, param: str) -> str:
    """Return a schema's text: an object, true or false, or a string with this text."""
    text = bytes(raw).decode().strip()
    if text.startswith('"'):
        text = msgspec.json.decode(raw, type=str).strip()
    if not text.startswith(("{", "true", "false")):
        raise invalid(f"{param}: allowed: a JSON schema, which is an object", param)
    return text


def behind_reasoning(spec: GrammarSpec, prompt: str, coder: TextCoder) -> GrammarSpec:
    """Return a chat answer's grammar. The grammar begins after a think block.

    A block is open if the prompt ends within the block. If the template knows blocks and the prompt
    does not end with a closed block, the answer may begin with a block with a single-token marker.
    """
    if begins_in_reasoning(prompt):
        return replace(spec, behind=CLOSE)
    if OPEN not in (coder.chat_template or "") or prompt.rstrip().endswith(CLOSE):
        return spec
    mark = coder.encode(OPEN)
    return replace(spec, behind=CLOSE, opener=mark[0]) if len(mark) == 1 else spec


class GrammarValidator:
    """Compiles grammars in threads, with a limit for threads and seconds."""

    def __init__(self, grammars: Grammars, *, seconds: float = SECONDS) -> None:
        self._grammars, self._seconds = grammars, seconds
        self._room = asyncio.Semaphore(_NUM_THREADS)
        self._threads: ThreadPoolExecutor | None = None
        self._is_loaded = False

    async def check(self, spec: GrammarSpec, param: str) -> None:
        """Compile a grammar within the time limit.

        A slow thread is not awaited. The thread stays unavailable until its end.

        Raises:
            ApiError: 400 for an invalid or slow grammar, 429 if all threads stay busy.
        """
        if self._threads is None:
            self._threads = roomy_threads(_NUM_THREADS, "grammars")
        loop = asyncio.get_running_loop()
        try:
            if not self._is_loaded:
                await loop.run_in_executor(self._threads, self._grammars.load)
                self._is_loaded = True
            async with asyncio.timeout(self._seconds):
                await self._room.acquire()
        except ConfigError as error:
            raise ApiError(400, "unsupported", str(error), param=param) from None
        except TimeoutError:
            said, after = "other grammars are being compiled", {"retry-after": "5"}
            raise ApiError(429, "overloaded", said, headers=after) from None
        job = loop.run_in_executor(self._threads, self._grammars.check, spec)
        job.add_done_callback(lambda done: self._leave(done))
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.shield(job)
        except RequestError as error:
            raise _refused(str(error), param) from None
        except TimeoutError:
            said = f"it takes longer than {self._seconds:g} s to compile; allowed: less"
            raise _refused(said, param) from None

    def _leave(self, done: asyncio.Future[None]) -> None:
        self._room.release()
        if not done.cancelled():
            done.exception()  # marks it as retrieved

    def close(self) -> None:
        """End the idle threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _refused(said: str, param: str) -> ApiError:
    return invalid(f"{param}: {said}", param, "invalid_grammar")
