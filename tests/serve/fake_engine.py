"""An engine process without a model.

The first byte in a prompt's last line selects the behavior. ``C``: the process ends. ``H``: it
hangs. ``N``: logits are NaN. ``F``: the step fails. ``S``: a token every 10 ms. ``W``: the first
engine never answers. By default, all tokens are immediate. Output is the alphabet. ``FAKE_LATE``
delays the start in seconds, and ``FAKE_PRECISION`` is the reported precision.
"""

from __future__ import annotations

import os
import shutil
import struct
import sys
import time
from pathlib import Path

from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.runtime.messages import (
    AbortRequest,
    EngineReady,
    EngineStarting,
    FromEngine,
    Heartbeat,
    NewTokens,
    RequestFailed,
    RequestFinished,
    RequestStarted,
    Shutdown,
)
from tilewright.runtime.request import EngineRequest
from tilewright.serve.engines.sockets import SocketTransport

CONTEXT = 4096
_ALPHABET = tuple(range(97, 123))
_BATCH = 64


class FakeEngine:
    """Answers until a stop message."""

    def __init__(self, transport: SocketTransport, *, is_first: bool) -> None:
        self._transport, self._is_first = transport, is_first
        self._live: dict[int, tuple[EngineRequest, int]] = {}
        self._next_beat = 0.0

    def run(self) -> None:
        """Run the message loop."""
        while True:
            said: list[FromEngine] = []
            for message in self._transport.receive(0.01 if self._live else 0.2):
                if isinstance(message, Shutdown):
                    return
                if isinstance(message, AbortRequest):
                    self._live.pop(message.request_id, None)
                elif isinstance(message, EngineRequest):
                    self._live[message.request_id] = (message, 0)
            for request_id in list(self._live):
                self._serve(request_id, said)
            if said or time.monotonic() > self._next_beat:
                self._next_beat = time.monotonic() + 0.2
                said.append(Heartbeat(len(self._live), 0, 0, 0, 0, 0))
            if said:
                self._transport.send(said)

    def _serve(self, request_id: int, said: list[FromEngine]) -> None:
        message, done = self._live[request_id]
        text = bytes(token for token in message.prompt if token < 256)
        what = (text.strip().splitlines() or [b""])[-1][:1]
        if what == b"W" and self._is_first:
            return
        if what in (b"C", b"H"):
            said.append(RequestStarted(request_id, 0.0, 0))
            self._transport.send(said)
            time.sleep(0.1 if what == b"C" else 3600)
            os._exit(3)
        if what in (b"N", b"F"):
            code = "not_a_number" if what == b"N" else "engine_error"
            said += [
                RequestStarted(request_id, 0.0, 0),
                RequestFailed(request_id, code, "as asked"),
            ]
            del self._live[request_id]
            return
        if not done:
            said.append(RequestStarted(request_id, 0.0, 0))
        if message.pooling:
            said.append(RequestFinished(request_id, "stop", 0.001, 0.0, vector=vector_of(message)))
            del self._live[request_id]
            return
        count = min(message.sampling.max_tokens - done, 1 if what == b"S" else _BATCH)
        tokens = tuple(_ALPHABET[at % 26] for at in range(done, done + count))
        asked = message.sampling
        echo = message.prompt[1:] if asked.prompt_logprobs is not None and not done else ()
        scores = scored(tokens) if asked.logprobs is not None else ()
        said.append(NewTokens(request_id, tokens, scores, scored(echo)))
        self._live[request_id] = (message, done + count)
        if done + count == message.sampling.max_tokens:
            said.append(RequestFinished(request_id, "length", 0.001, 0.001))
            del self._live[request_id]


def vector_of(message: EngineRequest) -> bytes:
    """Return a unit vector that depends on pooling and on the parity of the first token."""
    values = (0.6, 0.8) if message.pooling == "mean" else (0.8, 0.6)
    return (
        struct.pack("<3f", *values, 0.0)
        if message.prompt[0] % 2
        else struct.pack("<3f", 0, *values)
    )


def scored(tokens: tuple[int, ...]) -> tuple[LogProbs, ...]:
    """Return scores with each token as the most likely."""
    return tuple(LogProbs(-0.5, ((token, -0.5),)) for token in tokens)


def main(folder: Path, tokenizer: Path) -> None:
    """Send the ready message and run. Compilation of grammars reads a copy of the tokenizer."""
    transport = SocketTransport(folder)
    shutil.copytree(tokenizer, folder / tokenizer.name)
    transport.send([EngineStarting("weights", 1, 4), EngineStarting("a note")])
    transport.send([EngineStarting("weights", 1, 4)])
    time.sleep(float(os.environ.get("FAKE_LATE", "0")))
    precision = os.environ.get("FAKE_PRECISION", "{}")
    facts = {"name": "fake", "target": "null", "precision": precision, "weights": "random"}
    facts["configuration"] = "stored (Q4_1, Q8_0)"
    transport.send([EngineReady(256, 4, CONTEXT, CONTEXT, hidden_size=3, facts=facts)])
    try:
        FakeEngine(transport, is_first=folder.parts[-2:] == ("0", "0")).run()
    finally:
        transport.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
