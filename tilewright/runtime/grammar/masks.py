"""Token masks of requests with a grammar, computed in threads during a step."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.interface.token_masks import (
    TokenMask,
    no_words,
    num_words,
    put_bits,
)
from tilewright.errors import RequestError, TilewrightError, one_line
from tilewright.runtime.grammar.matchers import Grammars, Matcher, roomy_threads
from tilewright.runtime.scheduling.request_state import RequestState

_NUM_COMPILERS = 2
_NUM_MAKERS = min(8, os.cpu_count() or 1)
_LEAST_EACH = 8  # masks per thread: a mask takes only microseconds
_PATIENCE = 0.01


class Masks:
    """Matchers and masks of a loop's requests. Threads start with the first grammar.

    Attributes:
        compiling: Requests that wait for the compilation of their grammar.
    """

    def __init__(self, grammars: Grammars | None) -> None:
        self._grammars = grammars
        self._compilers: ThreadPoolExecutor | None = None
        self._makers: ThreadPoolExecutor | None = None
        self.compiling: dict[RequestState, Future[Matcher]] = {}
        self._wanted: list[tuple[Slot, RequestState]] = []
        self._words = no_words()
        self._jobs: list[Future[None]] = []

    def check(self) -> None:
        """Check that a grammar can be compiled.

        Raises:
            RequestError: if the loop has no tokenizer.
        """
        if self._grammars is None:
            raise RequestError("a grammar; allowed: none, for this loop has no tokenizer")

    def compile(self, request: RequestState) -> None:
        """Start the compilation of a checked request's matcher in a thread."""
        assert self._grammars is not None and request.grammar is not None
        if self._compilers is None:
            self._compilers = roomy_threads(_NUM_COMPILERS, "grammars")
        ends = request.sampling.stop_token_ids
        self.compiling[request] = self._compilers.submit(
            self._grammars.matcher, request.grammar, ends
        )

    def forget(self, request: RequestState) -> None:
        """Drop the compilation of a request."""
        future = self.compiling.pop(request, None)
        if future is not None:
            future.cancel()

    def compiled(self, *, waits: bool) -> list[tuple[RequestState, str]]:
        """Return requests with finished compilations, and an error or an empty text for each.

        ``waits``: wait a moment, because the loop has no other work.
        """
        if waits and self.compiling:
            wait(self.compiling.values(), _PATIENCE, return_when=FIRST_COMPLETED)
        done = [request for request, made in self.compiling.items() if made.done()]
        finished = []
        for request in done:
            error = ""
            try:
                request.matcher = self.compiling.pop(request).result()
            except TilewrightError as reason:
                error = one_line(reason)
            except Exception as reason:  # an error of the library fails only this request
                error = f"the grammar cannot be compiled: {one_line(reason)}"
            finished.append((request, error))
        return finished

    def begin(self, rows: Mapping[Slot, RequestState]) -> None:
        """Start the masks of rows with a known last token."""
        wait(self._jobs)  # jobs of a failed step
        self._jobs.clear()
        self._wanted = [
            (slot, request) for slot, request in rows.items() if request.matcher is not None
        ]
        count = len(self._wanted)
        if not count:
            return
        assert self._grammars is not None
        if self._makers is None:
            self._makers = roomy_threads(_NUM_MAKERS, "masks")
        if count > len(self._words):
            self._words = np.empty((count, num_words(self._grammars.vocab_size)), np.uint32)
        both = zip(self._wanted, self._words[:count], strict=True)
        todo = deque((each, words) for (_, each), words in both)
        for _ in range(min(_NUM_MAKERS, -(-count // _LEAST_EACH))):
            self._jobs.append(self._makers.submit(_make, todo))

    def take(self) -> tuple[TokenMask, list[RequestState]]:
        """Wait for the started masks. Return them, and the requests without an allowed token.

        The masks are valid until the next `begin`.
        """
        for job in self._jobs:
            job.result()
        words = self._words[: len(self._wanted)]
        is_there: list[bool] = (words != 0).any(axis=1).tolist()
        over = [each for (_, each), there in zip(self._wanted, is_there, strict=True) if not there]
        slots = [slot for (slot, _), there in zip(self._wanted, is_there, strict=True) if there]
        return TokenMask(tuple(slots), words[np.array(is_there)] if over else words), over

    def close(self) -> None:
        """End the threads for grammars and masks. Unfinished work is dropped."""
        for pool in (self._compilers, self._makers):
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)


def _make(todo: deque[tuple[RequestState, np.ndarray]]) -> None:
    """Write the rows in the queue. Some rows take a hundred times as long as others."""
    while todo:
        try:
            each, words = todo.popleft()
        except IndexError:  # another thread took the last row
            return
        write_allowed(each, words)


def write_allowed(request: RequestState, words: np.ndarray) -> None:
    """Write a request's allowed next tokens as a row of `TokenMask`.

    The row is empty if the grammar is complete without an end token, or if the matcher has failed.
    """
    matcher = request.matcher
    assert matcher is not None
    matcher.follow(request.output)
    if matcher.is_free:
        words.fill(~np.uint32(0))
        put_bits(words, matcher.end_tokens, are_set=False)
        return
    if matcher.error:
        words.fill(0)
        return
    matcher.write_bits(words)
    put_bits(words, matcher.model_ends, are_set=False)
    if matcher.is_met:
        put_bits(words, matcher.end_tokens, are_set=True)
    if matcher.opener is not None:
        put_bits(words, (matcher.opener,), are_set=True)


def no_token(request: RequestState) -> str:
    """Return the reason for an answer without an allowed token and an incomplete grammar."""
    said = request.matcher.error if request.matcher is not None else ""
    return f"no token obeys the grammar here{': ' + said if said else ''}"
