"""A server in this process whose engine says what the prompt tells it to: no model, no child."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from aiohttp import web
from tokenizers import decoders, models, pre_tokenizers

from tilewright.compiler.runtime.grammar import GrammarSpec
from tilewright.compiler.runtime.messages import Finished, Ready, Started, Submit, Tokens
from tilewright.compiler.runtime.sampling import SamplingParams
from tilewright.compiler.serve.app import make_app
from tilewright.compiler.serve.engine_client import READY, EngineClient, Ticket
from tilewright.compiler.serve.front import Front
from tilewright.compiler.serve.server import listen
from tilewright.compiler.serve.settings import Settings
from tilewright.compiler.serve.template import read_template
from tilewright.models.tokenizer.tokenizer import Tokenizer, byte_of_character
from tilewright.models.tokenizer.vocabulary import Vocabulary

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
        eos_ids=(256,),
        chat_template=template,
    )
    return Tokenizer(parts)


@dataclass
class ScriptedClient(EngineClient):
    """Answers with what stands between ``SAY(`` and ``)YAS`` last in the prompt, then ends."""

    coder: Tokenizer
    state: str = READY
    asked: list[Submit] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ready = Ready(self.coder.vocab_size, 4, 4096, 4096, facts={"name": "scripted"})

    @property
    def is_healthy(self) -> bool:
        return True

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        *,
        grammars: Sequence[GrammarSpec | None] = (),
        priority: int = 0,
    ) -> Ticket:
        ticket = Ticket(list(range(len(prompts))), self)
        for at, (prompt, chosen) in enumerate(zip(prompts, sampling, strict=True)):
            grammar = grammars[at] if grammars else None
            self.asked.append(Submit(at, tuple(prompt), chosen, priority, grammar))
            said = _SAY.findall(self.coder.decode(prompt, skip_special=False))
            tokens = [*self.coder.encode(said[-1] if said else ""), 256][: chosen.max_tokens]
            ticket.put(at, Started(at, 0.0, 0))
            for token in tokens:
                ticket.put(at, Tokens(at, (token,)))
            ticket.put(at, Finished(at, "stop" if tokens[-1] == 256 else "length", 0.0, 0.0))
        return ticket

    def cancel(self, request_id: int) -> None:
        pass


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
    """Serve with a chat template; ``chosen``: of `Settings`."""
    loop = asyncio.new_event_loop()
    settings, coder = replace(Settings(), **chosen), byte_coder(template)
    socket = listen("127.0.0.1", 0)
    client = ScriptedClient(coder)

    async def start() -> web.AppRunner:
        front = Front(settings, ["-c", ""], lambda folder: coder)
        front.client, front.coder = client, coder
        front.template = read_template(coder, settings.tool_format)
        runner = web.AppRunner(make_app(front))
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
