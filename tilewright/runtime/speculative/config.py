"""`SpeculativeConfig`: the speculative decoding options, with vLLM's keys. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.compiler.precision import AUTO, load_precision
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS, Capabilities
from tilewright.errors import ConfigError, allowed

NGRAM, MTP, DRAFT_MODEL = "ngram", "mtp", "draft_model"
METHODS = (NGRAM, MTP, DRAFT_MODEL)
_ALIASES = {"qwen3_5_mtp": MTP, "qwen3_next_mtp": MTP}
_AUTO_DRAFTS = 10
"""Default for n-grams. Measured costs shorten it, and long matches are right to their end."""
_DRAFTS, _LAYER_DRAFTS, _LOOKUP, _MAX_LOOKUP, _MAX_BATCH = 5, 3, 5, 64, 4096
_SCHEDULE = "num_speculative_tokens_per_batch_size"
_OWN_KEYS = {
    NGRAM: ("prompt_lookup_max", "prompt_lookup_min"),
    DRAFT_MODEL: ("model", "draft_precision", "draft_tensor_parallel_size"),
}
_KEYS = (
    *("method", "num_speculative_tokens", *_OWN_KEYS[NGRAM], *_OWN_KEYS[DRAFT_MODEL]),
    *(_SCHEDULE, "disable_by_batch_size"),
    *("draft_sample_method", "rejection_sample_method"),
)
_FIXED = {"draft_sample_method": "greedy", "rejection_sample_method": "standard"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made.

    Attributes:
        method: ``ngram``: the tokens after an earlier occurrence of the last tokens.
            ``mtp``: the model's own draft layer. ``draft_model``: a smaller model.
        model: The draft model. None: no draft model.
        precision: The draft model's precision, as ``EngineConfig.precision``. None: its default.
        max_drafts: Maximum draft tokens per request and step. A GPU reserves rows for them.
        max_auto_drafts: The maximum on targets that reserve no rows. None: ``max_drafts``.
        max_lookup, min_lookup: Longest and shortest match, in tokens.
        schedule: ``(first, last, drafts)`` by decoding request count, inclusive. A number
            outside has no drafts. None: measured times and acceptance decide.
    """

    method: str = NGRAM
    model: str | None = None
    precision: str | None = None
    max_drafts: int = _DRAFTS
    max_auto_drafts: int | None = None
    max_lookup: int = _LOOKUP
    min_lookup: int = _LOOKUP
    schedule: tuple[tuple[int, int, int], ...] | None = None

    @property
    def num_reserved(self) -> int:
        """Return the draft tokens per request and step for which a GPU reserves rows."""
        if self.max_auto_drafts is not None:
            return self.max_drafts
        return max((count for *_, count in self.schedule or ()), default=self.max_drafts)

    def limit(self, num_decoding: int) -> int:
        """Return the maximum draft tokens for this decoding request count."""
        if self.schedule is None:
            return self.max_auto_drafts or self.max_drafts
        limits = [k for first, last, k in self.schedule if first <= num_decoding <= last]
        return limits[0] if limits else 0


def read_speculative_config(text: str) -> SpeculativeConfig:
    """Read a JSON object.

    Raises:
        ConfigError: for malformed JSON, an unknown key or a value out of range.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text[:80]!r}: {error}; allowed: a JSON object") from None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{text[:80]!r}; allowed: a JSON object")
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"unknown key {key[:80]!r}; {allowed(_KEYS, key)}")
    method: Any = values.get("method")
    method = _ALIASES.get(method, method) if isinstance(method, str) else method
    if method not in METHODS:
        raise ConfigError(f"method {str(method)[:80]!r}; {allowed(METHODS, method)}")
    for other, keys in _OWN_KEYS.items():
        wrong = next((key for key in keys if key in values and method != other), None)
        if wrong is not None:
            raise ConfigError(f"{wrong} with method {method}; allowed: method {other}")
    model = values.get("model")
    if method == DRAFT_MODEL and not (isinstance(model, str) and model):
        raise ConfigError(f"model {str(model)[:80]!r}; allowed: a path or name of the draft model")
    precision = _precision(values)
    _integer(values, "draft_tensor_parallel_size", 1, 1)
    for key, value in _FIXED.items():
        if values.get(key, value) != value:
            raise ConfigError(f"{key} {str(values[key])[:80]!r}; allowed: {value}")
    requested = _integer(values, "num_speculative_tokens", 1, MAX_DRAFTS)
    count = requested or (_LAYER_DRAFTS if method == MTP else _DRAFTS)
    high = _integer(values, "prompt_lookup_max", 1, _MAX_LOOKUP)
    low = _integer(values, "prompt_lookup_min", 1, _MAX_LOOKUP)
    high, low = high or low or _LOOKUP, low or high or _LOOKUP
    if low > high:
        raise ConfigError(f"prompt_lookup_min {low}; allowed: 1 to prompt_lookup_max {high}")
    is_auto = requested is None and values.get(_SCHEDULE) is None and method == NGRAM
    schedule = _schedule(values, _AUTO_DRAFTS if is_auto else count)
    return SpeculativeConfig(
        method=str(method),
        model=model,
        precision=precision,
        max_drafts=count,
        max_auto_drafts=_AUTO_DRAFTS if is_auto else None,
        max_lookup=high,
        min_lookup=low,
        schedule=schedule,
    )


def draft_note(config: SpeculativeConfig | None, capabilities: Capabilities) -> str | None:
    """Return a note if drafts are configured and the target cannot verify drafts, else None."""
    if config is None:
        return None
    has_layer = config.method != MTP or capabilities.max_proposals
    if capabilities.max_drafts and has_layer:
        return None
    reason = "this target verifies no drafts of this model"
    if capabilities.max_drafts:
        reason = "this target runs no draft layer"
    return f"speculative_config: {reason}; decoding goes on without drafts"


def _precision(values: Mapping[str, Any]) -> str | None:
    name = values.get("draft_precision")
    if name in (None, AUTO):
        return None
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"draft_precision {str(name)[:80]!r}; allowed: auto, or a name, a file or a heading, "
            "as --precision"
        )
    try:
        load_precision(name)
    except ConfigError as error:
        reason = str(error).removeprefix("precision: ")
        raise ConfigError(f"draft_precision: {reason}") from None
    return name


def _integer(values: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key} {str(value)[:80]!r}; allowed: integers, {low} to {high}")
    return value


def _schedule(values: Mapping[str, Any], count: int) -> tuple[tuple[int, int, int], ...] | None:
    key, older = _SCHEDULE, "disable_by_batch_size"
    size = _integer(values, older, 2, _MAX_BATCH)
    rows = values.get(key)
    if rows is None:
        return None if size is None else ((1, size - 1, count),)
    if size is not None:
        raise ConfigError(f"{key} and {older}; allowed: either")
    if not isinstance(rows, list) or not rows or not all(map(_is_entry, rows)):
        raise ConfigError(
            f"{key} {str(rows)[:80]!r}; allowed: lists of first batch size, last batch size and "
            f"0 to {MAX_DRAFTS} drafts"
        )
    return tuple((first, last, drafts) for first, last, drafts in rows)


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in entry):
        return False
    return 1 <= entry[0] <= entry[1] and 0 <= entry[2] <= MAX_DRAFTS
