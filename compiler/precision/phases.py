"""Expansion and folding of settings by phase.

Configurations are stored by phase and printed with short keys. Values are only compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from tilewright.compiler.precision.names import PHASES, REFINED_OP_GROUPS, STORED_OP_GROUPS

T = TypeVar("T")


def expand_phases(given: Mapping[str, T]) -> dict[str, T]:
    """Replace each short key (``li_ff2``) with its two phases. Explicit phases take precedence."""
    settings = {key: value for key, value in given.items() if key not in REFINED_OP_GROUPS}
    for key, refined_keys in REFINED_OP_GROUPS.items():
        if key in given:
            for refined in refined_keys:
                settings.setdefault(refined, given[key])
    return settings


def fold_phases(settings: Mapping[str, T]) -> dict[str, T]:
    """Replace two phases of equal value with their short key. Unequal phases are unchanged."""
    folded = dict(settings)
    for key, (prefill, decode) in REFINED_OP_GROUPS.items():
        if prefill in folded and folded[prefill] == folded.get(decode):
            folded[key] = folded.pop(prefill)
            del folded[decode]
    return folded


def compact_settings(settings: Mapping[str, T]) -> dict[str, T]:
    """Replace both phases with their short key. :func:`expand_phases` is the inverse.

    If the phases differ, the short key has the decode value and the prefill entry remains.
    """
    compact = fold_phases(settings)
    for key, (prefill, decode) in REFINED_OP_GROUPS.items():
        if prefill in compact and decode in compact:
            compact[key] = compact.pop(decode)
    return compact


def stored_op_groups(family: str) -> tuple[str, ...]:
    """Return the stored op groups of ``family`` (``li_qkv``, ``li_lm_head``): a common group or one
    per phase.
    """
    keys = (family, *(f"{family}_{phase}" for phase in PHASES))
    return tuple(key for key in keys if key in STORED_OP_GROUPS)
