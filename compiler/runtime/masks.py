"""Which tokens each running answer may go on with, computed beside the step that wants to know."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from tilewright.compiler.errors import RequestError, TilewrightError, one_line
from tilewright.compiler.runtime.matchers import Grammars, Matcher, roomy_threads
from tilewright.compiler.runtime.request import Request
from tilewright.compiler.targets.step import Seat

_NUM_COMPILERS = 2
_MAX_MAKERS = 4
_LEAST_EACH = 8  # masks of tens of microseconds: fewer are not worth another thread
_PATIENCE = 0.01


@dataclass(frozen=True, slots=True)
class Mask:
    """What one row may choose: bool ``[vocabulary]``; none of it where ``request`` is over."""

    seat: Seat
    request: Request
    allowed: np.ndarray


class Masks:
    """Matchers and masks of a loop's requests; its threads are started with the first grammar."""

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._compilers: ThreadPoolExecutor | None = None
        self._makers: ThreadPoolExecutor | None = None
        self._compiling: dict[Request, Future[Matcher]] = {}
        self._jobs: list[Future[list[Mask]]] = []

    def check(self, request: Request) -> None:
        """Refuse a grammar where none can be obeyed.

        Raises:
            RequestError: there is no tokenizer here to compile it for.
        """
        if request.grammar is not None and self._grammars is None:
            raise RequestError("a grammar; allowed: none, for this loop has no tokenizer")

    @property
    def is_compiling(self) -> bool:
        """Whether any request still waits for its grammar to be compiled."""
        return bool(self._compiling)

    def compile(self, request: Request) -> None:
        """Make the matcher of a request that :meth:`check` accepts, beside the loop."""
        assert self._grammars is not None and request.grammar is not None
        if self._compilers is None:
            self._compilers = roomy_threads(_NUM_COMPILERS, "grammars")
        ends = request.sampling.end_tokens
        self._compiling[request] = self._compilers.submit(
            self._grammars.matcher, request.grammar, ends
        )

    def forget(self, request: Request) -> None:
        """Nobody waits for a request's matcher any more."""
        found = self._compiling.pop(request, None)
        if found is not None:
            found.cancel()

    def compiled(self, *, waits: bool) -> list[tuple[Request, str]]:
        """Requests that have their matchers now, or why they cannot have one; ``waits``: there is
        nothing else to do, for a moment.
        """
        if waits and self._compiling:
            wait(self._compiling.values(), _PATIENCE, return_when=FIRST_COMPLETED)
        done = [request for request, made in self._compiling.items() if made.done()]
        found = []
        for request in done:
            error = ""
            try:
                request.matcher = self._compiling.pop(request).result()
            except TilewrightError as reason:
                error = one_line(reason)
            except Exception as reason:  # a library's own: it costs this request alone
                error = f"the grammar cannot be compiled: {one_line(reason)}"
            found.append((request, error))
        return found

    def begin(self, rows: Mapping[Seat, Request]) -> None:
        """Start to compute the masks of rows whose answers are known up to the last token."""
        self._drain()
        wanted = [(seat, each) for seat, each in rows.items() if each.matcher is not None]
        if not wanted:
            return
        if self._makers is None:
            self._makers = roomy_threads(min(_MAX_MAKERS, os.cpu_count() or 1), "masks")
        size = max(_LEAST_EACH, -(-len(wanted) // min(_MAX_MAKERS, os.cpu_count() or 1)))
        for first in range(0, len(wanted), size):
            self._jobs.append(self._makers.submit(self._make, wanted[first : first + size]))

    def take(self) -> list[Mask]:
        """The masks that were begun; waits for them."""
        jobs, self._jobs = self._jobs, []
        return [mask for job in jobs for mask in job.result()]

    def close(self) -> None:
        """End the threads that compile grammars and make masks; what they still do is left."""
        for pool in (self._compilers, self._makers):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self) -> None:
        """Wait for what a step that failed has left behind."""
        wait(self._jobs)
        self._jobs.clear()

    def _make(self, wanted: Sequence[tuple[Seat, Request]]) -> list[Mask]:
        assert self._grammars is not None
        return [Mask(*each, allowed_by(each[1], self._grammars.vocab_size)) for each in wanted]


def allowed_by(request: Request, vocab_size: int) -> np.ndarray:
    """The tokens that a request's answer may go on with, bool ``[vocab_size]``; none where it has
    met its grammar and no token could say so, or where its matcher has failed.
    """
    matcher = request.matcher
    assert matcher is not None
    matcher.follow(request.output)
    if matcher.is_free:
        allowed = np.ones(vocab_size, dtype=bool)
        allowed[list(matcher.end_tokens)] = False
        return allowed
    if matcher.error:
        return np.zeros(vocab_size, dtype=bool)
    bits = np.frombuffer(matcher.bits(), dtype=np.uint8)
    allowed = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
    allowed[list(matcher.model_ends)] = False
    if matcher.is_met:
        allowed[list(matcher.end_tokens)] = True
    if matcher.opener is not None:
        allowed[matcher.opener] = True
    return allowed


def no_token(request: Request) -> str:
    """Why an answer cannot go on, though it has not met its grammar."""
    said = request.matcher.error if request.matcher is not None else ""
    return f"no token obeys the grammar here{': ' + said if said else ''}"
