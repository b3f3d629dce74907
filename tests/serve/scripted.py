"""A server in this process whose engine says what the prompt tells it to: no model, no child."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from tilewright.models.tokenizer.tokenizer import Tokenizer, byte_of_character
from tilewright.models.tokenizer.vocabulary import Vocabulary
from tilewright.runtime.grammar.matchers import Grammars
from tilewright.runtime.messages import (
    EngineReady,
    NewTokens,
    RequestFinished,
    RequestStarted,
    ToEngine,
)
from tilewright.runtime.request import EngineRequest
from tilewright.serve.api_server import ApiServer
from tilewright.serve.engines.client import EngineClient
from tilewright.serve.engines.process import READY
from tilewright.serve.engines.request_tracker import RequestTracker
from tilewright.serve.engines.routing import ReplicaRouter
from tilewright.serve.prompt.structured import GrammarValidator
from tilewright.serve.prompt.template import read_template
from tilewright.serve.web.app import make_app
from tilewright.serve.web.server import listen
from tilewright.serve.web.settings import ServerConfig

END = 256
SPECIALS = ("<|end|>", "[TOOL_CALLS]", "<|python_tag|>")
_SAY = re.compile(r"SAY\((.*?)\)YAS", re.DOTALL)


def byte_coder(template: str) -> Tokenizer:
    """A token a byte, and some special ones, of which the first ends answers."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    vocab = {characters[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIALS))
    parts = Vocabulary(
        where=Path("bytes"),
        backend=backend,
        special_tokens={},
        eos_ids=(END,),
        chat_template=template,
    )
    return Tokenizer(parts)


class ScriptedClient(EngineClient):
    """Answers with what stands between ``SAY(`` and ``)YAS`` last in the prompt, then ends.

    Attributes:
        asked: what it was asked so far.
    """

    def __init__(self, coder: Tokenizer) -> None:
        self.coder, self.asked = coder, list[EngineRequest]()
        self.engines = ()
        self.ready = EngineReady(coder.vocab_size, 4, 4096, 4096, facts={"name": "scripted"})
        router = ReplicaRouter(1)
        self._tracker = RequestTracker(lambda _: 0, self._send, router, ServerConfig())

    @property
    def state(self) -> str:
        return READY

    @property
    def is_healthy(self) -> bool:
        return True

    async def close(self) -> None:
        pass

    def _send(self, engine: int, message: ToEngine) -> None:
        if isinstance(message, EngineRequest):
            self.asked.append(message)
            asyncio.get_running_loop().call_soon(self._answer, message)

    def _answer(self, asked: EngineRequest) -> None:
        said = _SAY.findall(self.coder.decode(asked.prompt, skip_special=False))
        tokens = [*self.coder.encode(said[-1] if said else ""), END]
        tokens = tokens[: asked.sampling.max_tokens]
        self._tracker.on_message(RequestStarted(asked.request_id, 0.0, 0), 1)
        for token in tokens:
            self._tracker.on_message(NewTokens(asked.request_id, (token,)), 1)
        reason = "stop" if tokens[-1] == END else "length"
        self._tracker.on_message(RequestFinished(asked.request_id, reason, 0.0, 0.0), 1)


@dataclass(frozen=True, slots=True)
class Scripted:
    """Where it listens, and what it was asked."""

    url: str
    client: ScriptedClient

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return self.client.coder.decode(self.client.asked[-1].prompt, skip_special=False)


@contextmanager
def scripted(template: str, **chosen: Any) -> Iterator[Scripted]:
    """Serve with a chat template; ``chosen``: of `ServerConfig`."""
    loop = asyncio.new_event_loop()
    settings, coder = replace(ServerConfig(), **chosen), byte_coder(template)
    socket = listen("127.0.0.1", 0)
    client = ScriptedClient(coder)

    async def start() -> web.AppRunner:
        front = ApiServer(settings, (), lambda folder: coder)
        await front.client.close()  # no engine was started
        front.client, front.coder = client, coder
        front.template = read_template(coder, settings.tool_format)
        grammars = Grammars(
            lambda: coder._backend.to_str(), end_tokens=(END,), vocab_size=coder.vocab_size
        )
        front.trials = GrammarValidator(grammars)
        app = make_app(front)
        app.on_cleanup.append(lambda _: front.close())
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, socket).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield Scripted(f"http://127.0.0.1:{socket.getsockname()[1]}", client)
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
