"""Rank handshake: comparison of code, checkpoint, precision, options and mesh by hash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilewright.errors import ConfigError

CODE, CHECKPOINT, PRECISION, OPTIONS = "code", "checkpoint", "precision", "options"
FOLDER = "compiled folder"
MESH, TORCH, KERNELS = "mesh", "torch", "kernels"


class RanksDifferError(ConfigError):
    """Raised on every rank if the ranks of a group differ."""


def check_equal(facts: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that differ; ``facts`` are those of each rank, in order.

    Raises:
        RanksDifferError: naming the fact, both ranks and what each of them has.
    """
    first = facts[0]
    for rank, found in enumerate(facts):
        for name in {**first, **found}:
            ours, theirs = first.get(name) or "nothing", found.get(name) or "nothing"
            if ours != theirs:
                raise RanksDifferError(
                    f"rank 0 has {name} {_short(ours)} and rank {rank} {_short(theirs)}; allowed: "
                    "the same on all ranks"
                )


def _short(value: str) -> str:
    is_hash = len(value) > 20 and all(each in "0123456789abcdef" for each in value)
    return value[:12] if is_hash else value[:80]
