"""Keys of recorded results and sweep events: one table per record, field name to JSON key.

A renamed field has the same key as before, so recorded lines and trial ids remain valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Keys = Mapping[str, str]


def _keys(names: str, **renamed: str) -> Keys:
    """Return a table of fields named as their keys, and of renamed fields."""
    return {**{name: name for name in names.split()}, **renamed}


def to_keys(values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return a record's values by key."""
    return {keys[name]: value for name, value in values.items()}


def from_keys(values: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """Return a record's values by field. An unknown key is its own field name."""
    fields = {key: name for name, key in keys.items()}
    return {fields.get(key, key): value for key, value in values.items()}


REPEAT = _keys("ttft_ms prefill_tps decode_tsu tps ttft_first_ms ttft_median_ms ttft_last_ms")
PAIRED = _keys("base b c p")
ACCURACY = _keys(
    "reference_id num_positions num_top1 num_top5 top1_interval top5_interval kl_mean paired "
    "hits kl_error text"
)
CONTRACT_LINE = _keys("field requested status effective layers")
CEILINGS = _keys("device reads products product_type")
RESULT = _keys(
    "case model weights model_hash device device_detail target mesh dp batch prompt_length "
    "num_generated context precision_name precision_id heading effective_id compute kind "
    "repeats ttft_ms ttft_first_ms ttft_median_ms ttft_last_ms prefill_tps decode_tsu tps "
    "spread ttft_spread decode_error ttft_error peak_memory_bytes resident_bytes cache_bytes "
    "accuracy sampling ceilings command calibration contract versions commit host timestamp drafts"
)
DRAFTS = _keys("method precision num_drafts num_draft_tokens num_accepted")
CELL = _keys(
    "model model_name model_hash target device precision precision_id heading case kind compute "
    "round threads text weight_bytes step_bytes part is_kept calibration speculative"
)
PLANNED = _keys("version plan options base timestamp commit versions")
ADDED = _keys("cell")
STARTED = _keys("cell timestamp")
FINISHED = _keys("cell outcome seconds reason result")
COMMANDS = _keys("cell what")
