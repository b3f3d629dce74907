"""The record of one measurement: `Result` and its parts, validated at construction.

Excludes measurement, storage (``result_file.py``) and printing (``perf_tables.py``).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import types
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.evaluate.results import keys, stats

SCHEMA = 1

Kind = Literal["measured", "emulated", "predicted", "published"]
KINDS: tuple[Kind, ...] = ("measured", "emulated", "predicted", "published")
WEIGHTS = ("checkpoint", "random")
COMPUTES = ("fast", "exact")
RANDOM_WEIGHTS = "(random weights)"
"""Marker of random weights in the Model column of PERF.md. A model's name must not end with it."""
ADDED_LATER = types.MappingProxyType({"added_later": True})
"""Metadata of fields that older lines do not have. All other fields are required."""
_HEX = "0123456789abcdef"


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """One timed run of a case. Times are in ms and rates in tokens per second.

    Attributes:
        ttft_ms: Time to first token. In a batch, the time to prefill all users divided by their
            number.
        prefill_tps: Prompt tokens per second.
        decode_tsu: Decoded tokens per second for one user, without the first decode step.
        tps: Decoded tokens per second over all users.
        ttft_first_ms, ttft_median_ms, ttft_last_ms: Over a batch's users.
    """

    ttft_ms: float | None = None
    prefill_tps: float | None = None
    decode_tsu: float | None = None
    tps: float | None = None
    ttft_first_ms: float | None = None
    ttft_median_ms: float | None = None
    ttft_last_ms: float | None = None

    def __post_init__(self) -> None:
        _check_numbers(self)


def medians(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Return the fields of a Result that its repeats determine: ``Result(...,
    **medians(repeats))``.

    A field without values is None. A spread of fewer than two repeats is None. Spreads are
    fractions, (max - min) / median.
    """
    values = {
        field.name: [value for each in repeats if (value := getattr(each, field.name)) is not None]
        for field in dataclasses.fields(Repeat)
    }
    found = {name: statistics.median(each) if each else None for name, each in values.items()}
    for name, field in (("spread", "decode_tsu"), ("ttft_spread", "ttft_ms")):
        found[name] = stats.spread(values[field]) if len(values[field]) > 1 else None
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Paired:
    """Comparison with the base configuration at the same positions.

    Attributes:
        base: The base configuration's name.
        b: Positions correct in the base only.
        c: Positions correct in this configuration only.
        p: Exact two-sided McNemar p.
    """

    base: str
    b: int
    c: int
    p: float

    def __post_init__(self) -> None:
        _check_numbers(self)

    @classmethod
    def from_counts(cls, base: str, *, b: int, c: int) -> Paired:
        """Return the comparison of two counts, with its p-value."""
        return cls(base=base, b=b, c=c, p=stats.mcnemar(b, c))

    @classmethod
    def from_hits(cls, base: str, *, theirs: Sequence[bool], ours: Sequence[bool]) -> Paired:
        """Return the comparison of two runs at the same positions. ``theirs`` are the base's hits.

        Raises:
            ValueError: The lengths differ.
        """
        b, c = stats.discordant(theirs, ours)
        return cls.from_counts(base, b=b, c=c)


def pack_hits(hits: Sequence[bool]) -> str:
    """Return hits as lower-case hex. Position i is bit ``i % 4``, from the most significant, of
    digit ``i // 4``. Trailing bits are zero.
    """
    digits = [hits[start : start + 4] for start in range(0, len(hits), 4)]
    return "".join(_HEX[sum(8 >> at for at, hit in enumerate(four) if hit)] for four in digits)


def unpack_hits(text: str, num_positions: int) -> tuple[bool, ...]:
    """Return the ``num_positions`` hits packed by `pack_hits`.

    Raises:
        ConfigError: The text has a different length, an invalid character or a hit after the end.
    """
    if len(text) != -(-num_positions // 4):
        raise ConfigError(
            f"accuracy hits of {len(text)} digits for {num_positions} positions; "
            f"allowed: {-(-num_positions // 4)}"
        )
    if wrong := next((character for character in text if character not in _HEX), ""):
        raise ConfigError(f"accuracy hits hold {wrong!r}; allowed: the digits {_HEX}")
    bits = [bool(_HEX.index(digit) & (8 >> at)) for digit in text for at in range(4)]
    if any(bits[num_positions:]):
        raise ConfigError(f"accuracy hits behind position {num_positions}; allowed: zeros there")
    return tuple(bits[:num_positions])


@dataclasses.dataclass(frozen=True, slots=True)
class Accuracy:
    """Teacher-forced agreement with the fp32 reference.

    Attributes:
        reference_id: The reference file's id.
        num_positions: Counted predictions.
        num_top1, num_top5: Predictions equal to the reference's first, or among its five.
        top1_interval, top5_interval: 95 % Wilson intervals, as fractions.
        kl_mean: Mean KL divergence from the reference, in nats.
        paired: Comparison with the base. None: no base.
        hits: Top-1 positions, packed by `pack_hits`.
        kl_error: Standard error of ``kl_mean`` over the positions, in nats.
        text: An included text's name, or a name for a user's file.
    """

    reference_id: str
    num_positions: int
    num_top1: int
    num_top5: int
    top1_interval: tuple[float, float]
    top5_interval: tuple[float, float]
    kl_mean: float | None = None
    paired: Paired | None = None
    hits: str | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    kl_error: float | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    text: str = dataclasses.field(default=ACCURACY_TEXT, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        _check_numbers(self, signed="kl_mean")  # rounding may give a negative mean of zeros
        for low, high in (self.top1_interval, self.top5_interval):
            if not 0 <= low <= high <= 1:
                raise ConfigError(
                    f"accuracy interval {low}, {high}; allowed: 0 <= low <= high <= 1"
                )
        if not (0 <= self.num_top1 <= self.num_top5 <= self.num_positions > 0):
            raise ConfigError(
                f"accuracy counts {self.num_top1}, {self.num_top5} of {self.num_positions}: "
                "need 0 <= top-1 <= top-5 <= positions, positions > 0"
            )
        check_plain("text", self.text)
        if self.hits is not None:
            num_hits = sum(unpack_hits(self.hits, self.num_positions))
            if num_hits != self.num_top1:
                raise ConfigError(f"accuracy hits are {num_hits}; allowed: {self.num_top1} (top-1)")

    @classmethod
    def from_counts(
        cls,
        reference_id: str,
        *,
        num_positions: int,
        num_top1: int,
        num_top5: int,
        **others: Any,
    ) -> Accuracy:
        """Return a record with computed intervals. ``others`` are the remaining fields."""
        return cls(
            reference_id=reference_id,
            num_positions=num_positions,
            num_top1=num_top1,
            num_top5=num_top5,
            top1_interval=stats.wilson_interval(num_top1, num_positions),
            top5_interval=stats.wilson_interval(num_top5, num_positions),
            **others,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ContractLine:
    """One field of a target's numeric contract: requested and effective value.

    Attributes:
        layers: Affected layers. Empty: all.
    """

    field: str
    requested: str
    status: str
    effective: str
    layers: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured peak rates of a device: bytes read and operations per second.

    Attributes:
        products: Large dense matmul rates in ``product_type``. A multiply-add has two
            operations.
    """

    device: str
    reads: tuple[float, ...]
    products: tuple[float, ...]
    product_type: str

    def __post_init__(self) -> None:
        for name in ("reads", "products"):
            values = getattr(self, name)
            if not values or not all(0 < value <= _LARGEST for value in values):
                raise ConfigError(f"ceilings: {name} {values!r:.60}; allowed: finite and above 0")

    @property
    def bytes_per_s(self) -> float:
        """Median read rate in bytes per second."""
        return statistics.median(self.reads)

    @property
    def flops_per_s(self) -> float:
        """Median matmul rate in floating-point operations per second."""
        return statistics.median(self.products)


@dataclasses.dataclass(frozen=True, slots=True)
class Drafts:
    """Speculative decoding of a case's requests.

    Attributes:
        method: ``ngram``, ``mtp`` or ``draft_model``.
        precision: The draft model's configuration. Empty: its default, or no draft model.
        num_drafts: Verified drafts.
        num_draft_tokens: Their tokens.
        num_accepted: Accepted tokens by position in the draft.
    """

    method: str
    precision: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted: tuple[int, ...]

    def __post_init__(self) -> None:
        check_plain("drafts method", self.method)
        counts = (*self.num_accepted, 0)
        falls = all(before >= after for before, after in itertools.pairwise(counts))
        if not falls or not self.num_drafts >= counts[0]:
            raise ConfigError(
                f"result: drafts accepted {list(self.num_accepted)!r:.60} of {self.num_drafts}; "
                "allowed: counts that fall by position"
            )

    @property
    def length(self) -> float | None:
        """Mean tokens per verification. None: no drafts."""
        return 1 + sum(self.num_accepted) / self.num_drafts if self.num_drafts else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of accepted drafts by position. Empty: no drafts."""
        return tuple(n / self.num_drafts for n in self.num_accepted) if self.num_drafts else ()


_LARGEST = 1e18
HEADING_FORM = "precision_cfg = {...}, fidelity_cfg = {...}"

_MESH = re.compile(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}")
_MINIMA = {"dp": 1, "batch": 1, "prompt_length": 0, "num_generated": 0, "context": 0}
_PLAIN = ("model", "device", "target", "precision_name", "case")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One self-contained measurement.

    Lengths are in tokens per user, memory in bytes, times in ms, rates in tokens per second, and
    spreads are fractions.

    Attributes:
        mesh: Rows x columns of devices in a data-parallel group.
        batch: Batch size of a data-parallel group.
        decode_error, ttft_error: Relative error of a predicted metric at the 90th percentile.
        sampling: Sampling parameters as text. Empty: greedy.
        calibration: Method and text of calibrated weights. Empty: round to nearest. `model_hash` is
            that of the original model.
        ceilings: Peak rates of the device in the same run.
        drafts: Acceptance in a further run with drafts. Times are without drafts.
        command: The measuring command without its output path. Empty: unknown.
        timestamp: ISO 8601 with an offset, as from `environment`.

    Raises:
        ConfigError: A value is invalid. Names the field.
    """

    case: str
    model: str
    weights: Literal["checkpoint", "random"]
    model_hash: str
    device: str
    device_detail: str
    target: str
    mesh: str = "1x1"
    dp: int = 1
    batch: int
    prompt_length: int
    num_generated: int
    context: int
    precision_name: str
    precision_id: str
    heading: str
    effective_id: str
    compute: Literal["fast", "exact"] = "fast"
    kind: Kind = "measured"
    repeats: tuple[Repeat, ...] = ()
    ttft_ms: float | None = None
    ttft_first_ms: float | None = None
    ttft_median_ms: float | None = None
    ttft_last_ms: float | None = None
    prefill_tps: float | None = None
    decode_tsu: float | None = None
    tps: float | None = None
    spread: float | None = None
    ttft_spread: float | None = None
    decode_error: float | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    ttft_error: float | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    peak_memory_bytes: int | None = None
    resident_bytes: int | None = None
    cache_bytes: int | None = None
    accuracy: Accuracy | None = None
    sampling: str = dataclasses.field(default="", metadata=ADDED_LATER)
    ceilings: Ceilings | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    command: str = dataclasses.field(default="", metadata=ADDED_LATER)
    calibration: str = dataclasses.field(default="", metadata=ADDED_LATER)
    drafts: Drafts | None = dataclasses.field(default=None, metadata=ADDED_LATER)
    contract: tuple[ContractLine, ...] = ()
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    commit: str | None = None
    host: str = ""
    timestamp: str

    def __post_init__(self) -> None:
        check_choices({name: getattr(self, name) for name in _CHOICES})
        for name in _PLAIN:
            check_plain(name, getattr(self, name))
        if self.calibration:
            check_plain("calibration", self.calibration)
        if self.model.endswith(RANDOM_WEIGHTS) or "(" in self.device or ")" in self.device:
            raise ConfigError(
                f"result: model {self.model!r}, device {self.device!r}: random weights, DP and "
                "mesh are fields of their own, not part of a name"
            )
        if not is_heading(self.heading):
            raise ConfigError(f"result: heading {self.heading!r}; allowed: {HEADING_FORM}")
        if not _MESH.fullmatch(self.mesh):
            raise ConfigError(f"result: mesh {self.mesh!r}; allowed: ROWSxCOLUMNS, as 1x8")
        for name, least in _MINIMA.items():
            if getattr(self, name) < least:
                raise ConfigError(f"result: {name} {getattr(self, name)}; allowed: >= {least}")
        _check_numbers(self)
        _ = self.when

    @property
    def when(self) -> datetime:
        """The timestamp as a datetime.

        Raises:
            ConfigError: The timestamp is invalid.
        """
        try:
            when = datetime.fromisoformat(self.timestamp)
        except ValueError:
            when = None
        if when is None or when.tzinfo is None:
            raise ConfigError(
                f"result: timestamp {self.timestamp!r}; allowed: ISO 8601 with an offset"
            )
        return when

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values by key, with the schema version first."""
        return {"schema": SCHEMA, **_by_key(self)}


KEYS: dict[type, keys.Keys] = {
    Repeat: keys.REPEAT,
    Paired: keys.PAIRED,
    Accuracy: keys.ACCURACY,
    ContractLine: keys.CONTRACT_LINE,
    Ceilings: keys.CEILINGS,
    Drafts: keys.DRAFTS,
    Result: keys.RESULT,
}
"""Key table of each record type."""


def _by_key(value: Any) -> Any:
    """Return records as dictionaries by key, inside tuples too."""
    if isinstance(value, tuple):
        return tuple(map(_by_key, value))
    if (table := KEYS.get(type(value))) is None:
        return value
    return {key: _by_key(getattr(value, name)) for name, key in table.items()}


def is_heading(text: str) -> bool:
    """Return whether a line has a precision heading's form. Its maps are not parsed."""
    return (
        text.startswith("precision_cfg = {")
        and "}, fidelity_cfg = {" in text
        and text.isprintable()
        and text == text.strip()
    )


def _check_numbers(record: Repeat | Paired | Accuracy | Result, *, signed: str = "") -> None:
    """Check that every number is finite, small enough for a float, and not negative unless
    ``signed``.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        least = -_LARGEST if field.name == signed else 0
        if isinstance(value, int | float) and not least <= value <= _LARGEST:
            raise ConfigError(f"result: {field.name} {str(value)[:40]}; allowed: finite and >= 0")


_CHOICES: dict[str, Sequence[str]] = {"kind": KINDS, "weights": WEIGHTS, "compute": COMPUTES}


def check_choices(values: dict[str, Any]) -> None:
    """Check fields with a fixed set of values.

    Raises:
        ConfigError: Names the field, its value and the allowed values.
    """
    for name, choices in _CHOICES.items():
        if isinstance(value := values.get(name, choices[0]), str) and value not in choices:
            raise ConfigError(f"result: {name} {value[:40]!r}; {allowed(choices)}")


def check_plain(name: str, value: str) -> None:
    """Check that a name fits a table cell.

    Raises:
        ConfigError: The name is not a plain line of text.
    """
    if not value or value != value.strip() or not value.isprintable() or "|" in value:
        raise ConfigError(
            f"result: {name} {value!r}; allowed: one line of text without '|' or outer blanks"
        )
