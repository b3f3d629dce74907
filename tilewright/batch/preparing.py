"""Jobs from rows, made as in the API server, but synchronously."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from tilewright.batch.records import Item
from tilewright.errors import ConfigError, RequestError
from tilewright.runtime.grammar.matchers import Grammars, roomy_threads
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.messages import EngineReady
from tilewright.serve.prompt.structured import SECONDS
from tilewright.serve.prompt.template import TemplateFacts
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.task_maker import TaskMaker
from tilewright.serve.tasks import Served
from tilewright.serve.web.errors import invalid, refuse
from tilewright.serve.web.requests import ChatRequest, Common, CompletionRequest, decode
from tilewright.serve.web.responses import CompletionTask

_SEED_BITS = 63
_NUM_THREADS = 2
_T = TypeVar("_T")


class BatchGrammarValidator:
    """Compiles grammars before the engine does, in threads with large stacks."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads: ThreadPoolExecutor | None = None

    def check(self, spec: GrammarSpec, param: str) -> None:
        """Compile a grammar within the time limit. Raises ApiError 400."""
        if self._threads is None:
            self._threads = roomy_threads(_NUM_THREADS, "grammars")
            self._threads.submit(self._load).result()  # takes seconds, once
        try:
            self._threads.submit(self._grammars.check, spec).result(SECONDS)
        except (RequestError, ConfigError) as error:
            raise refuse(error, "invalid_grammar", param) from None
        except TimeoutError:
            said = f"{param}: it takes longer than {SECONDS:g} s to compile; allowed: less"
            raise invalid(said, param, "invalid_grammar") from None

    def _load(self) -> None:
        with suppress(ConfigError):  # `check` raises it again
            self._grammars.load()


@dataclass(kw_only=True)
class Preparer(TaskMaker):
    """Makes jobs of rows. The same row always gives the same job.

    Attributes:
        model: the model and its settings.
        template: the chat template's properties.
        trials: compiles grammars.
        template_variables: variables for the chat template.
        max_tokens: default output tokens. None: the free context.
        ignore_eos: whether answers continue after end tokens.
        seed: the seeds' base for rows without a seed. The row number is added.
        created: time in the answers, in seconds since 1970.
    """

    model: Served
    template: TemplateFacts
    trials: BatchGrammarValidator
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    ignore_eos: bool = False
    seed: int = 0
    created: int = 0

    def job(self, item: Item) -> CompletionTask:
        """Return a row's job.

        Raises:
            ApiError: 400 for requests that the server would refuse.
        """
        request: Common
        request, ignored = decode(item.body, ChatRequest if item.is_chat else CompletionRequest)
        complete = self._with_defaults(request, item)
        if isinstance(complete, ChatRequest):
            job = _result_of(self.chat_job(complete))
        else:
            assert isinstance(complete, CompletionRequest)
            job = _result_of(self.completion_job(complete))
        job.ignored = (*ignored, *(["stream"] if request.stream else []))
        kind = "chatcmpl" if item.is_chat else "cmpl"
        job.request_id, job.created = f"{kind}-{item.row}", self.created
        return job

    def _with_defaults(self, request: Common, item: Item) -> Common:
        changes: dict[str, object] = {}
        if request.seed is None:
            digest = hashlib.blake2b(f"{self.seed} {item.row}".encode(), digest_size=8).digest()
            changes["seed"] = int.from_bytes(digest) >> (64 - _SEED_BITS)
        if request.max_tokens is None:
            changes["max_tokens"] = self.max_tokens
        if self.ignore_eos:
            changes["ignore_eos"] = True
        return msgspec.structs.replace(request, **changes)

    def up(self) -> tuple[EngineReady, TextCoder]:
        """See `TaskMaker`."""
        return self.model.ready, self.model.coder

    def served(self, request: Common, num_prompts: int) -> Served:
        """See `TaskMaker`."""
        return self.model

    async def check_grammar(self, spec: GrammarSpec, param: str) -> None:
        """See `TaskMaker`."""
        self.trials.check(spec, param)

    async def aside(self, size: int, function: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run a function in this thread. The API server runs large inputs in another thread."""
        return function(*given, **named)


def _result_of(made: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that never waits."""
    try:
        made.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise AssertionError("the coroutine waits")
