"""Typed access to a configuration file's keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tilewright.errors import CheckpointError, allowed
from tilewright.models.config import MAX_HEAD_DIM


class Keys:
    """Typed access to a mapping from a file. Errors have file, key, value and range.

    All requested keys are recorded, so that unread keys can be rejected.
    """

    def __init__(self, values: Mapping[str, object], where: Path | str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix
        self._read: set[str] = set()

    def get(self, key: str) -> object:
        """Return a key's value, or None if it is missing. The key counts as read."""
        self._read.add(key)
        return self.values.get(self.prefix + key)

    def section(self, key: str, value: Mapping[str, object]) -> Keys:
        """Return the keys in a nested object. Messages name them ``key.name``."""
        named = {f"{key}.{name}": item for name, item in value.items()}
        return Keys(named, self.where, f"{key}.")

    def unread(self, key: str) -> object:
        """Return an unread key's value, or None."""
        return None if key in self._read else self.values.get(self.prefix + key)

    def refuse_unread(self, neutral: Mapping[str, Iterable[object]]) -> None:
        """Reject unread keys in ``neutral`` unless their value is missing, null or neutral."""
        for key, values in neutral.items():
            value = self.unread(key)
            if value is None or value in values:
                continue
            shown = [str(each).lower() if isinstance(each, bool) else each for each in values]
            raise self.error(key, value, allowed(map(str, shown or ["null"])))

    def refuse_others(self) -> None:
        """Reject every unread key with the prefix, unless it is null."""
        for name, value in self.values.items():
            key = name.removeprefix(self.prefix)
            if name.startswith(self.prefix) and key not in self._read and value is not None:
                raise self.error(key, value, "allowed: keys " + ", ".join(sorted(self._read)))

    def error(self, key: str, value: object, tail: str) -> CheckpointError:
        """Return an error for a key's value. ``tail`` lists the allowed values."""
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.where}: {self.prefix}{key} = {shown} is not read; {tail}")

    def _missing(self, key: str, tail: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {self.prefix}{key} is missing; {tail}")

    def integer(self, key: str, low: int, high: int, *, default: int | None = None) -> int:
        """Return a whole number in [low, high], or ``default`` if the key is missing or null.

        Raises:
            CheckpointError: The value is invalid, or missing without a default.
        """
        tail = f"allowed: a whole number from {low} to {high}"
        value = self.get(key)
        if value is None:
            if default is None:
                raise self._missing(key, tail)
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, value, tail)
        return int(value)

    def real(self, key: str, low: float, high: float, *, default: float | None = None) -> float:
        """Return a positive number in [low, high], or ``default`` if the key is missing or null.

        Raises:
            CheckpointError: The value is invalid, or missing without a default.
        """
        tail = f"allowed: a number above 0, from {low:g} to {high:g}"
        value = self.get(key)
        if value is None:
            if default is None:
                raise self._missing(key, tail)
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, value, tail)
        if not (low <= value <= high and value > 0):
            raise self.error(key, value, tail)
        return float(value)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` positive finite numbers.

        Raises:
            CheckpointError: The value is missing or invalid.
        """
        value = self.get(key)
        tail = f"allowed: a list of {count} numbers above 0"
        if value is None:
            raise self._missing(key, tail)
        if not isinstance(value, list) or len(value) != count:
            raise self.error(key, value, tail)
        for item in value:
            is_number = isinstance(item, (int, float)) and not isinstance(item, bool)
            if not is_number or not 0 < item < float("inf"):
                raise self.error(key, item, tail)
        return tuple(map(float, value))

    def optional_real(self, key: str, low: float, high: float) -> float | None:
        """Return a number as `real`, or None if the key is missing or null."""
        return None if self.get(key) is None else self.real(key, low, high)

    def boolean(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or ``default`` if the key is missing or null.

        Raises:
            CheckpointError: The value has another type.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, value, "allowed: true, false")
        return value

    def choice(self, key: str, choices: tuple[str, ...], *, default: str) -> str:
        """Return a value in ``choices``, or ``default`` if the key is missing or null.

        Raises:
            CheckpointError: The value is not in ``choices``.
        """
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            raise self.error(key, value, allowed(choices))
        return value


def read_kv_heads(keys: Keys, key: str, num_heads: int) -> int:
    """Return the number of key/value heads. The default is the query head count.

    Raises:
        CheckpointError: The number does not divide ``num_heads``.
    """
    num_kv_heads = keys.integer(key, 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(key, num_kv_heads, f"allowed: a divisor of the {num_heads} heads")
    return num_kv_heads


def read_head_dim(keys: Keys, key: str, hidden: int, num_heads: int) -> int:
    """Return the channels per head. The default is the hidden size over the heads.

    Raises:
        CheckpointError: The number is odd, or the default is not a whole number.
    """
    if keys.get(key) is None and hidden % num_heads:
        raise CheckpointError(
            f"{keys.where}: {keys.prefix}{key} is missing and the hidden size {hidden} "
            f"is not a multiple of the {num_heads} heads; allowed: a multiple"
        )
    head_dim = keys.integer(key, 1, MAX_HEAD_DIM, default=hidden // num_heads)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise keys.error(key, head_dim, f"allowed: an even number from 2 to {MAX_HEAD_DIM}")
    return head_dim
