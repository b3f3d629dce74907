"""What an engine is to a comparison, and the two ends of the process that holds one.

JSON lines: the process writes what it loaded, then answers each ``{tokens, num_tokens}`` it reads
(``num_users`` besides, where there are several) with ``{tokens, times}``. While it waits for a line
it does nothing. From outside it is asked, watched until it is idle, ended; one that crashes or
hangs costs its own row alone: every failure is a `WorkerError` of one line. It knows no engine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar, cast

import msgspec

from tilewright.utils.child_process import Child, Ended

_CLOSING_SECONDS = 5
_SETTLING_SECONDS = 5
_LOOK_SECONDS = 0.05
_STILL_LOOKS = 3
_MOST_CHARACTERS = 300
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bytes of the weights as held, and what a decode step reads of them (None: not known)."""

    weight_bytes: int
    step_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Generated:
    """A greedy continuation; ``times[i]``: seconds from the call until token ``i`` was known."""

    tokens: tuple[int, ...]
    times: tuple[float, ...]


class Engine(Protocol):
    """A loaded model. End tokens do not end a continuation."""

    def loaded(self) -> Loaded:
        """The bytes of the weights it holds, and those of them that a step reads."""

    def generate(self, tokens: Sequence[int], num_tokens: int) -> Generated:
        """Prefill ``tokens`` into an empty state, then choose ``num_tokens`` greedily."""


class ServesMany(Engine, Protocol):
    """An engine that serves several users at a time."""

    def generate_together(
        self, tokens: Sequence[int], num_tokens: int, num_users: int
    ) -> Generated:
        """Do what ``generate`` does for so many users; a token's time is the last user's."""


def cache_name(source: Path, *parts: str) -> str:
    """What another form of a model's file is called in a cache: by all that it depends on."""
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return f"{source.stem}-{key}"


def serve(open_engine: Callable[[], Engine], requests: TextIO, answers: TextIO) -> int:
    """Open an engine and answer until ``requests`` ends; returns the exit code.

    What an engine raises becomes ``{error}``: one line for the table of results.
    """

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    try:
        engine = open_engine()
        answer(dataclasses.asdict(engine.loaded()))
        for line in requests:
            asked = json.loads(line)
            work = asked["tokens"], asked["num_tokens"]
            if "num_users" in asked:
                many = cast("ServesMany", engine)
                found = many.generate_together(*work, asked["num_users"])
            else:
                found = engine.generate(*work)
            answer(dataclasses.asdict(found))
    except Exception as error:
        kind = type(error).__name__
        answer({"error": " ".join(f"{kind}: {error}".split())})
        return 1
    return 0


def take_standard_output() -> TextIO:
    """Standard output for answers alone: what libraries print goes to standard error instead."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


class WorkerError(Exception):
    """Why an engine gave no answer, in one line."""


class Worker:
    """A process that runs `serve`; it is killed where an answer takes ``timeout_s``."""

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._child = Child(command, has_pipes=True, environment=environment, what="an engine")

    def loaded(self) -> Loaded:
        """Wait until the engine is loaded. Raises WorkerError."""
        return self._answer(Loaded)

    def generate(self, tokens: Sequence[int], num_tokens: int, *, num_users: int = 1) -> Generated:
        """Ask the process for one continuation, or one of each of several users. Raises
        WorkerError.
        """
        asked: dict[str, Any] = {"tokens": list(tokens), "num_tokens": num_tokens}
        if num_users > 1:
            asked["num_users"] = num_users
        self._child.write(msgspec.json.encode(asked) + b"\n")
        found = self._answer(Generated)
        if len(found.times) != num_tokens:
            raise WorkerError(f"gave an answer that is none: {len(found.times)} times")
        return found

    def settle(self) -> None:
        """Wait until the process is idle: thread pools spin for a second or more after their work,
        on the very cores that the next engine needs.
        """
        deadline = time.monotonic() + _SETTLING_SECONDS
        used, still = self._ticks(), 0
        while still < _STILL_LOOKS and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            now = self._ticks()
            still = still + 1 if now == used else 0
            used = now

    def _ticks(self) -> int:
        """Processor time of all its threads so far, in the kernel's ticks."""
        try:
            stat = Path(f"/proc/{self._child.pid}/stat").read_text(encoding="ascii")
        except OSError:
            return 0  # it has ended, or this is no Linux
        user, system = stat.rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    def close(self) -> Ended:
        """End the process: it ends by itself when its input does, else it is killed."""
        return self._child.close(_CLOSING_SECONDS)

    def _answer(self, kind: type[_T]) -> _T:
        line = self._child.read_line(self._timeout_s)
        if line is None:
            self._child.stop()
            raise WorkerError(f"no answer within {self._timeout_s:g} s; killed")
        if not line:
            ended = self._child.wait(_CLOSING_SECONDS)
            if ended is None:
                raise WorkerError("closed its output")
            said = f": {ended.last[:_MOST_CHARACTERS]}" if ended.last else ""
            raise WorkerError(f"ended with {ended.how}{said}")
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            if "error" not in values:
                return msgspec.convert(values, kind)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            said = line.decode(errors="replace").strip()[:_MOST_CHARACTERS]
            raise WorkerError(f"gave an answer that is none: {said!r}") from None
        raise WorkerError(str(values["error"])[:_MOST_CHARACTERS])
