"""Acceptance of drafts on a case's requests. Excludes times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.measure.timing import OFFLINE, TimedRequest
from tilewright.evaluate.results.record import Drafts
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.speculative.config import SpeculativeConfig
from tilewright.runtime.speculative.draft_model import DraftModel

_MAX_SEQS = 4096


def count_drafts(
    executable: Executable,
    jobs: Sequence[TimedRequest],
    config: SpeculativeConfig,
    model: DraftModel | None = None,
) -> Drafts:
    """Run all requests with drafts. Return the accepted tokens by position.

    Without a schedule, every draft has the maximum length: acceptance then depends on no time.
    """
    schedule = config.schedule or ((1, _MAX_SEQS, config.max_drafts),)
    policy = replace(OFFLINE, speculative=replace(config, schedule=schedule))
    loop = EngineLoop(executable, policy=policy, draft_model=model)
    loop.generate([RequestState(n, job.prompt, job.sampling) for n, job in enumerate(jobs)])
    counts = loop.scheduler.speculator.counts
    return Drafts(
        method=config.method,
        precision=config.precision or "",
        num_drafts=counts.num_drafts,
        num_draft_tokens=counts.num_draft_tokens,
        num_accepted=tuple(counts.num_accepted),
    )
