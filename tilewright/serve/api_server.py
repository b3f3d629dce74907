"""The API server's state: settings, engines, tokenizer and metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tilewright.images.fetch import MediaHosts
from tilewright.images.tiles import TileSettings
from tilewright.runtime.grammar.matchers import grammars_of
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.messages import EngineReady
from tilewright.serve.engines.client import TOKENIZER, EngineClient
from tilewright.serve.engines.process import LOADING
from tilewright.serve.metrics import Metrics
from tilewright.serve.prompt.structured import GrammarValidator
from tilewright.serve.prompt.template import TemplateFacts, read_template
from tilewright.serve.prompt.texts import TextCoder
from tilewright.serve.responses.store import ResponseStore
from tilewright.serve.task_maker import TaskMaker
from tilewright.serve.tasks import Served, fingerprint_of
from tilewright.serve.web.errors import ApiError, invalid
from tilewright.serve.web.requests import (
    Common,
)
from tilewright.serve.web.server_log import tell
from tilewright.serve.web.settings import MAX_BODY, MAX_IMAGE_BODY, ServerConfig

LoadCoder = Callable[[Path], TextCoder]
_IMAGE_THREADS = 2
_SHORT = 4096  # characters below which text is tokenized without a thread
_T = TypeVar("_T")


class ApiServer(TaskMaker):
    """The API server's state. The constructor needs a running event loop.

    Args:
        settings: the server's configuration.
        command: the engine's command, see `EngineClient`.
        load_coder: loads the tokenizer from the engine's directory.
    """

    def __init__(
        self, settings: ServerConfig, command: Sequence[str], load_coder: LoadCoder
    ) -> None:
        self.settings = settings
        self.is_draining = False
        self.created = int(time.time())
        self.coder: TextCoder | None = None
        self.template = TemplateFacts()
        self.template_variables = settings.template_variables
        self.image_limits = settings.limit_mm_per_prompt
        if settings.allowed_media_domains:
            max_bytes = self.image_limits.max_bytes
            self.media_hosts = MediaHosts(names=settings.allowed_media_domains, max_bytes=max_bytes)
        self.trials: GrammarValidator | None = None
        self.fingerprint = ""
        self.responses = ResponseStore()
        self.defaults = dict(settings.defaults)
        self._load_coder = load_coder
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="texts")
        self._image_threads = ThreadPoolExecutor(_IMAGE_THREADS, thread_name_prefix="images")
        self.client = EngineClient(command, self._take_ready, settings)
        self.metrics = self._metrics("")

    def _metrics(self, model: str) -> Metrics:
        pids = [partial(getattr, engine, "pid") for engine in self.client.engines]
        return Metrics(self.settings.metrics_names, model, pids)

    async def close(self) -> None:
        """End the engines. Unfinished texts are dropped."""
        await self.client.close()
        for threads in (self._threads, self._image_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self.trials is not None:
            self.trials.close()

    async def _take_ready(self, engine: int, folder: Path, ready: EngineReady) -> None:
        """Handle a started engine: load the tokenizer and set the names."""
        if self.coder is None:
            coder = await self.in_thread(self._load_coder, folder / TOKENIZER)
            forced = self.settings.tool_format
            template = await self.in_thread(read_template, coder, forced)
            grammars = grammars_of(folder / TOKENIZER, coder.eos_ids, ready.vocab_size)
            await self.in_thread(grammars.prepare)
            self.template, self.trials = template, GrammarValidator(grammars)
            self.metrics = self._metrics(self.names(ready)[0])
            self.coder = coder
        if not self.client.engines[engine].num_restarts:
            name = f"replica {engine}: " if len(self.client.engines) > 1 else ""
            tell(f"tilewright: {name}ready: {capacity(ready)}")
        self.defaults = {**self.settings.defaults, **json.loads(ready.facts.get("sampling", "{}"))}
        self.fingerprint = fingerprint_of(ready.facts)

    def names(self, ready: EngineReady) -> tuple[str, ...]:
        """Return the model's names. Responses contain the first name."""
        return self.settings.served_model_name or (ready.facts.get("name", "model"),)

    async def in_thread(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Run a slow function in a thread."""
        call = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def aside(self, size: int, function: Callable[..., _T], *given: Any, **named: Any) -> _T:
        """Run a function in a thread if ``size`` characters are many, else directly."""
        if size < _SHORT:
            return function(*given, **named)
        return await self.in_thread(function, *given, **named)

    async def with_images(self, function: Callable[..., _T], *values: Any, **named: Any) -> _T:
        """See `TaskMaker`. Slow hosts do not delay texts. The thread count bounds the memory."""
        call = partial(function, *values, **named)
        return await asyncio.get_running_loop().run_in_executor(self._image_threads, call)

    @property
    def max_body(self) -> int:
        """Return a body's maximum size in bytes."""
        ready = self.client.ready
        return MAX_BODY if ready is None or ready.images is None else MAX_IMAGE_BODY

    def health(self) -> str:
        """Return ``ok``, ``loading``, ``draining`` or ``engine down``."""
        if self.is_draining:
            return "draining"
        if self.client.is_healthy:
            return "ok"
        return "loading" if self.client.state == LOADING else "engine down"

    def up(self) -> tuple[EngineReady, TextCoder]:
        """Return the engines' properties, and the tokenizer.

        Raises:
            ApiError: 503 without an engine, or while the server drains.
        """
        state = self.health()
        ready, coder = self.client.ready, self.coder
        if state == "draining" or ready is None or coder is None or self.client.state == LOADING:
            code = state if state in ("draining", "loading") else "engine_down"
            after = {"retry-after": "5"}
            raise ApiError(503, code, f"the server is {state}", headers=after)
        return ready, coder

    async def check_grammar(self, spec: GrammarSpec, param: str) -> None:
        """See `TaskMaker`."""
        assert self.trials is not None
        await self.trials.check(spec, param)

    def check_model(self, model: str | None, ready: EngineReady) -> None:
        """Raise ApiError 404 for an unknown model name, if the settings are strict."""
        names = self.names(ready)
        if self.settings.strict_model and model not in (None, *names):
            said = f"model {str(model)[:100]!r}; allowed: {', '.join(names)}"
            raise ApiError(404, "model_not_found", said, param="model")

    def served(self, request: Common, num_prompts: int) -> Served:
        """Return the current model. Engines may be lost during tokenization.

        Raises:
            ApiError: without an engine, or if the choice count is above the queue limit.
        """
        ready, coder = self.up()
        n = request.n or 1
        if num_prompts * n > self.settings.max_queue:
            raise invalid(f"n: {num_prompts} prompts of {n} choices are too many", "n")
        return Served(
            ready=ready,
            coder=coder,
            name=self.names(ready)[0],
            fingerprint=self.fingerprint,
            defaults=self.defaults,
        )


def capacity(ready: EngineReady) -> str:
    """Return a line about an engine: slots, pages, bytes and prefix cache."""
    parts = [f"{ready.max_num_seqs} slots of {ready.max_context:,} tokens"]
    size = f"{ready.cache_bytes / 1e9:.1f} GB"
    if ready.page_size:
        tokens = ready.num_pages * ready.page_size
        full = tokens / ready.max_context
        parts.append(f"{ready.num_pages:,} pages of {ready.page_size} tokens in {size}")
        parts.append(f"{tokens:,} tokens or {full:.1f} full contexts")
    else:
        parts.append(f"{size} when all are full")
    if ready.num_snapshots:
        parts.append(f"{ready.num_snapshots} snapshots")
    parts.append(f"prefix cache {'on' if ready.shares_prefixes else 'off'}")
    if isinstance(ready.images, TileSettings):
        rows = ready.images.max_tiles * ready.images.rows_per_tile
        parts.append(f"a new image costs {rows:,} rows of its tower")
    if ready.invariant == "rows":
        most = ready.invariant_rows
        parts.append("batch-invariant" + (f" up to {most} running requests" if most else ""))
    return ", ".join(parts)
