"""Record of a run of ``python -m bench bench-nodes``."""

from __future__ import annotations

from dataclasses import dataclass

FREE = "free"


@dataclass(frozen=True, slots=True)
class Run:
    """One run: tokens a second, and of each predicted token what rank 0 sent and waited; the share
    of the machine's cores that others took meanwhile.
    """

    model: str
    nodes: int
    threads: int
    link: str
    wire: str
    prompt_rate: float
    decode_rate: float
    sent_kb: float
    exchange_ms: float
    prompt_tokens: int
    command: str
    others: float
