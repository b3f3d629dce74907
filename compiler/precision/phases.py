"""Settings by phase, and the short keys that stand for both: the only place that folds them.

Configurations are stored by phase and written in short; no value is looked at but for equality.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tilewright.compiler.precision.names import PHASES, REFINED_OP_GROUPS, STORED_OP_GROUPS

T = TypeVar("T")


def expand_phases(given: Mapping[str, T]) -> dict[str, T]:
    """Replaces each short key (``li_ff2``) by its two phases, unless those are given themselves."""
    settings = {key: value for key, value in given.items() if key not in REFINED_OP_GROUPS}
    for key, refined_keys in REFINED_OP_GROUPS.items():
        if key in given:
            for refined in refined_keys:
                settings.setdefault(refined, given[key])
    return settings


def fold_phases(settings: Mapping[str, T]) -> dict[str, T]:
    """Replaces two phases of equal value by their short key; unequal ones stay as they are."""
    folded = dict(settings)
    for key, (prefill, decode) in REFINED_OP_GROUPS.items():
        if prefill in folded and folded[prefill] == folded.get(decode):
            folded[key] = folded.pop(prefill)
            del folded[decode]
    return folded


def compact_settings(settings: Mapping[str, T]) -> dict[str, T]:
    """Folds both phases into their short key: where they differ it has the value of decode, and
    that of prefill stands beside it. :func:`expand_phases` gives the settings back.
    """
    compact = fold_phases(settings)
    for key, (prefill, decode) in REFINED_OP_GROUPS.items():
        if prefill in compact and decode in compact:
            compact[key] = compact.pop(decode)
    return compact


def stored_op_groups(family: str) -> tuple[str, ...]:
    """The op groups that ``family`` (``li_qkv``, ``li_lm_head``) is stored as: one a phase, or one
    for both.
    """
    keys = (family, *(f"{family}_{phase}" for phase in PHASES))
    return tuple(key for key in keys if key in STORED_OP_GROUPS)
