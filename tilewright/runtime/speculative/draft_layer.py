"""`DraftLayerClient`: drafts from an executable's draft layer. Excludes acceptance."""

from __future__ import annotations

from collections.abc import Mapping

from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import Step
from tilewright.runtime.scheduling.request_state import NO_SLOT, RequestState


class DraftLayerClient:
    """Greedy drafts from the draft layer of the verifying executable."""

    def __init__(self, executable: Executable) -> None:
        self._executable = executable

    def propose(self, counts: Mapping[RequestState, int]) -> dict[RequestState, tuple[int, ...]]:
        """Return up to ``counts`` tokens after the request output. Wait for them.

        A draft ends before logits with NaN, so it may be empty.
        """
        requests = {request.slot: request for request in counts if request.slot != NO_SLOT}
        if not requests:
            return {}
        proposes = {slot: counts[request] for slot, request in requests.items()}
        (output,) = self._executable.step(Step(proposes=proposes)).parts
        drafts, first = {}, 0
        chosen = output.read()
        assert chosen.counts is not None
        for slot, count in zip(output.slots, chosen.counts, strict=True):
            drafts[requests[slot]] = tuple(chosen.tokens[first : first + count])
            first += count
        return drafts

    def can_read(self, request: RequestState) -> bool:
        """Return True: the layer has the model's vocabulary."""
        return True

    def prepare(self) -> None:
        """Do nothing: the executable prepares its layer."""
