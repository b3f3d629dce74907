"""`EngineRequest`: a request as an engine receives it. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.errors import RequestError
from tilewright.images.prompt import PromptImage
from tilewright.runtime.grammar.spec import GrammarSpec

UNNUMBERED = 0
"""`EngineRequest.request_id` before the tracker gives a number."""

STOPPED, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "error"


class EngineRequest(msgspec.Struct, frozen=True, tag=True):
    """A prompt in token ids, and its output's options. The engine sends one output back.

    Attributes:
        request_id: New number.
        priority: Lower values run first. Clients of equal priority take turns.
        grammar: Grammar for the output. None: any text.
        cache_salt: Requests with equal salts share the prefix cache.
        client: Client name.
        like: Earlier request with the same prompt. The engine computes the prompt once.
        speculative: Allow draft tokens.
        images: Images in the prompt, in order.
        pooling: Name in `POOLINGS` if the output is a vector. Empty: the output is text.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    grammar: GrammarSpec | None = None
    cache_salt: str = ""
    client: str = ""
    like: int | None = None
    pooling: str = ""
    speculative: bool = True
    images: tuple[PromptImage, ...] = ()

    @property
    def image_bytes(self) -> int:
        """Return the size of all pixels."""
        return sum(len(placed.image.pixels) for placed in self.images)


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Check that all ids are in the vocabulary.

    Raises:
        RequestError: The first id outside the vocabulary.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(f"token {wrong}; allowed: 0 to {vocab_size - 1}")
