"""Which requests the next step works on: lengths and capabilities, no tensors, no device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tilewright.compiler.errors import RequestError
from tilewright.compiler.runtime.request import Request
from tilewright.compiler.targets.base import Capabilities

PREFILL_CHUNK = 512
"""Tokens of a prompt in one step, where neither the caller nor the executable has a wish."""


def prefill_chunk_of(capabilities: Capabilities, wanted: int | None = None) -> int:
    """The tokens of a prompt in one step: ``wanted``, or else as many as the executable likes."""
    chosen = wanted if wanted is not None else capabilities.prefill_chunk
    chunk = PREFILL_CHUNK if chosen is None else chosen
    assert chunk > 0
    return chunk


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Compute the next ``num_tokens`` of ``request`` in this step."""

    request: Request
    num_tokens: int


class Scheduler:
    """First come, first served; prompts before decoding, long prompts in chunks.

    A request is admitted once its whole length fits, so a running request never has to stop.
    ``reserve`` and ``release`` attach and detach a request's state. ``prefill_chunk``: see
    :func:`prefill_chunk_of`.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        reserve: Callable[[Request], None],
        release: Callable[[Request], None],
        num_free: Callable[[], int],
        prefill_chunk: int | None = None,
    ) -> None:
        self.capabilities = capabilities
        self.prefill_chunk = prefill_chunk_of(capabilities, prefill_chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._reserve = reserve
        self._release = release
        self._num_free = num_free

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: for an empty prompt, or one that cannot fit the context with its output.
        """
        context = self.capabilities.max_context
        if not request.prompt:
            raise RequestError("the prompt is empty; allowed: at least one token")
        if request.max_positions > context:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens and {request.sampling.max_tokens} to "
                f"generate do not fit the context; allowed: {context + 1} together"
            )

    def add(self, request: Request) -> None:
        """Queue a request that :meth:`check` accepts.

        Raises:
            RequestError: for one that it refuses.
        """
        self.check(request)
        self.waiting.append(request)

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def can_admit(self) -> bool:
        """Whether a request waits and there is state for it."""
        return bool(self.waiting) and self._num_free() > 0

    def schedule(self) -> list[Scheduled]:
        """The next step's work; empty when there is none.

        Raises:
            RequestError: as ``reserve`` does; the request then still waits, at its place.
        """
        while self.can_admit():
            self._reserve(self.waiting[0])
            self.running.append(self.waiting.popleft())
        prefills = [request for request in self.running if request.is_prefill]
        decodes = [Scheduled(request, 1) for request in self.running if not request.is_prefill]
        chunk = [
            Scheduled(request, min(self.prefill_chunk, len(request.prompt) - request.num_computed))
            for request in prefills[: self.capabilities.max_prefill_sequences]
        ]
        if self.capabilities.mixed_steps:
            return chunk + decodes
        return chunk or decodes

    def finish(self, request: Request) -> None:
        """Takes a request that has ended out of the queue or the batch; its state is released."""
        if request in self.running:
            self.running.remove(request)
            self._release(request)
        elif request in self.waiting:
            self.waiting.remove(request)
