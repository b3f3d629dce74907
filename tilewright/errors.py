"""User errors. Any other exception is an internal error."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST_NAME = 80
"""Maximum number of compared characters of a given value."""


class TilewrightError(Exception):
    """A user error on a single line: place, mistake and allowed values.

    Commands exit with ``exit_code``.
    """

    exit_code = 2


class CheckpointError(TilewrightError):
    """A model's files are missing, truncated, corrupt or unsupported."""


class ConfigError(TilewrightError):
    """A configuration file or an option has an invalid value."""


class CompileError(TilewrightError):
    """A model, a configuration and a target do not fit together."""


class NoRoomError(CompileError):
    """The compiled program cannot be written: full disk, limit, or no temporary directory."""


class RankError(TilewrightError):
    """A rank has ended, hangs or does not answer. The whole group ends."""

    exit_code = 3


class RankRefusedError(TilewrightError):
    """Another rank has refused the request first."""


class ExchangeError(RankError):
    """A collective has failed. ``rank`` is the absent rank.

    Args:
        said: the rank's failure.
        rank: rank number.
        after: waiting time in words. Empty: the rank is gone.
    """

    def __init__(self, said: str, rank: int, after: str = "") -> None:
        super().__init__(f"{said} {after}".rstrip())
        self.rank, self._said, self._after = rank, said, after

    def of_step(self, number: int) -> str:
        """Return the message with the collective's step."""
        return f"{self._said} of step {number} {self._after}".rstrip()


class RequestError(TilewrightError):
    """A request is invalid: long prompt, unknown id, or parameter out of range."""


def one_line(error: BaseException, length: int = 200) -> str:
    """Return a library's error as a printable line of at most ``length`` characters."""
    text = " ".join(str(error).split())[:length] or type(error).__name__
    return text if text.isprintable() else repr(text)


def allowed(values: Iterable[object], given: object = None) -> str:
    """Return the end of an error message: ``allowed: a, b, c``.

    A value similar to ``given`` is suggested: ``allowed: a, b, c; did you mean 'b'?``.
    """
    names = [str(value) for value in values]
    close = []
    if isinstance(given, str):
        close = get_close_matches(given[:_LONGEST_NAME].lower(), names, n=1)
    return "allowed: " + ", ".join(names) + "".join(f"; did you mean {name!r}?" for name in close)
