"""`Speculator`: which requests of a step have drafts, and what became of them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.errors import one_line
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.scheduling.step_cost_model import StepCostModel
from tilewright.runtime.speculative.config import DRAFT_MODEL, MTP, NGRAM, SpeculativeConfig
from tilewright.runtime.speculative.counts import (
    GRAMMAR,
    IMAGES,
    NO_NUMBER,
    OPT_OUT,
    PENALTIES,
    VOCABULARY,
    SpeculationCounts,
)
from tilewright.runtime.speculative.draft_layer import DraftLayerClient
from tilewright.runtime.speculative.draft_length import DraftLength
from tilewright.runtime.speculative.draft_model import DraftModel
from tilewright.runtime.speculative.ngram import NgramIndex


class Speculator:
    """Proposes drafts for decoding requests.

    A request has drafts if its last token is known, and if it has neither penalties nor a grammar.
    Draft models and draft layers read no images.

    Attributes:
        max_drafts: Maximum draft tokens per request and step. 0: no drafts.
        is_warming_up: Propose constant drafts, to measure step times.
        seconds: Time of the last :meth:`propose`.
    """

    def __init__(
        self,
        config: SpeculativeConfig | None,
        capabilities: Capabilities,
        cost: StepCostModel,
        model: DraftModel | DraftLayerClient | None = None,
    ) -> None:
        """``model``: Draft model or draft layer. None: drafts come from n-grams."""
        self._model = model
        self._is_enabled = config is not None
        self._config = config or SpeculativeConfig()
        longest = self._config.max_auto_drafts or self._config.max_drafts
        count = max((k for *_, k in self._config.schedule or ()), default=longest)
        limit = capabilities.max_drafts if config is not None else 0
        if self._config.method == MTP:
            limit = min(limit, capabilities.max_proposals)
        self.max_drafts = min(count, limit)
        self._cost = cost
        self.is_warming_up = False
        self.seconds = 0.0
        self._said = set[str]()
        self.forget()

    def facts(self) -> dict[str, Any] | None:
        """Return the options for clients. None: no speculative decoding."""
        if not self._is_enabled:
            return None
        facts = {"method": self._config.method, "num_speculative_tokens": self.max_drafts}
        if self._config.method == NGRAM:
            facts["prompt_lookup_max"] = self._config.max_lookup
            facts["prompt_lookup_min"] = self._config.min_lookup
        elif self._config.model is not None:
            facts["model"] = self._config.model
        reasons = [PENALTIES, GRAMMAR, OPT_OUT]
        reasons += [] if self._model is None else [IMAGES, NO_NUMBER]
        reasons += [VOCABULARY] if self._config.method == DRAFT_MODEL else []
        return {**facts, "without_drafts": reasons}

    @property
    def has_counts(self) -> bool:
        """Return whether requests could have drafts at the start, even if they failed later."""
        return bool(self.counts.num_accepted)

    def forget(self) -> None:
        """Discard all observations."""
        drafted_ms = partial(self._cost.decode, has_drafts=True)
        self._length = DraftLength(self.max_drafts, self._cost.decode, drafted_ms)
        self.counts = SpeculationCounts(num_accepted=[0] * self.max_drafts)

    def on_arrival(self, request: RequestState) -> None:
        """Decide whether a new request has drafts."""
        if request.pooling is not None:
            request.has_drafts = False
            return
        reason = ""
        if not request.has_drafts:
            reason = OPT_OUT
        elif request.sampling.is_penalised:
            reason = PENALTIES
        elif request.grammar is not None:
            reason = GRAMMAR
        elif request.images and self._model is not None:
            reason = IMAGES
        if reason:
            self._exclude(request, reason)

    def _exclude(self, request: RequestState, reason: str) -> None:
        request.has_drafts = False
        counts = self.counts.without_drafts
        counts[reason] = counts.get(reason, 0) + 1

    def must_wait(self, request: RequestState) -> bool:
        """Return whether a step without the request is better than a step before its next token is
        known.
        """
        if request.num_unread_rows:
            return True
        if not request.has_drafts or request.num_scheduled == len(request.output):
            return False
        if (
            not self.max_drafts
            or request.replay_tokens
            or not request.output
            or not self._length.is_on
        ):
            return False
        return self._model is not None or self._index(request).may_match_next()

    def propose(self, decoding: Sequence[RequestState]) -> dict[RequestState, tuple[int, ...]]:
        """Return a step's drafts by request."""
        if not self.max_drafts:
            return {}
        began = time.perf_counter()
        drafts = self._propose(decoding)
        self.seconds = time.perf_counter() - began
        return drafts

    def _propose(self, decoding: Sequence[RequestState]) -> dict[RequestState, tuple[int, ...]]:
        drafts: dict[RequestState, tuple[int, ...]] = {}
        limit = min(self._config.limit(len(decoding)), self.max_drafts)
        counts: dict[RequestState, int] = {}
        for request in decoding:
            count = min(limit, request.max_output - len(request.output) - 1)
            if count > 0 and self._is_known(request):
                counts[request] = count
        if self._model is not None:
            limit = self._choose(len(decoding), [*counts.values()], limit)
            short = {request: min(count, limit) for request, count in counts.items()}
            found = self._drafts_of(self._model, short) if limit else {}
            for request in [request for request, draft in found.items() if not draft]:
                del found[request]
                if not self._model.can_read(request):
                    self._exclude(request, VOCABULARY)
                    continue
                self._exclude(request, NO_NUMBER)
                self._say("logits of a draft are no numbers; its request goes on without drafts")
            return {request: _up_to_image(request, draft) for request, draft in found.items()}
        for request, count in counts.items():
            draft = (0,) * count if self.is_warming_up else self._draft(request, count)
            if draft:
                drafts[request] = draft
        limit = self._choose(len(decoding), [len(draft) for draft in drafts.values()], limit)
        return {request: draft[:limit] for request, draft in drafts.items()} if limit else {}

    def _drafts_of(
        self, model: DraftModel | DraftLayerClient, counts: dict[RequestState, int]
    ) -> dict[RequestState, tuple[int, ...]]:
        """Return the model's drafts. After a failure, decoding goes on without drafts."""
        try:
            return model.propose(counts)
        except Exception as error:
            self.max_drafts = self.counts.length = 0
            self._say(f"drafts failed ({one_line(error)}); decoding goes on without them")
            return {}

    def _say(self, text: str) -> None:
        """Write a line on standard error, the same line once."""
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(OSError):  # full disk
                print(f"tilewright: {text}", file=sys.stderr)

    def _choose(self, num_rows: int, lengths: Sequence[int], limit: int) -> int:
        """Return the maximum draft length for drafts with these lengths."""
        if not lengths:
            self._length.skip()
            return 0
        if self._config.schedule is None and not self.is_warming_up:
            limit = self._length.choose(num_rows, lengths)
        self.counts.length = limit
        return limit

    def record(self, request: RequestState, num_drafts: int, num_accepted: int) -> None:
        """Count a verified draft."""
        counts = self.counts
        counts.num_drafts += 1
        counts.num_draft_tokens += num_drafts
        for at in range(num_accepted):
            counts.num_accepted[at] += 1
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_accepted
        self._length.record(num_drafts, num_accepted)

    def _draft(self, request: RequestState, count: int) -> tuple[int, ...]:
        return _up_to_image(request, self._index(request).propose(count))

    @staticmethod
    def _is_known(request: RequestState) -> bool:
        """Return whether a request's drafts can begin."""
        if not request.has_drafts or request.replay_tokens or not request.output:
            return False
        return request.num_scheduled == len(request.output)

    def _index(self, request: RequestState) -> NgramIndex:
        index = request.ngrams
        if index is None:
            longest, shortest = self._config.max_lookup, self._config.min_lookup
            index = request.ngrams = NgramIndex(request.prompt, longest=longest, shortest=shortest)
        index.update(request.output)
        return index


def _up_to_image(request: RequestState, draft: tuple[int, ...]) -> tuple[int, ...]:
    """Return a draft up to the first image placeholder, which is never sampled."""
    placeholders = request.image_tokens
    stop = next((at for at, token in enumerate(draft) if token in placeholders), len(draft))
    return draft[:stop]
