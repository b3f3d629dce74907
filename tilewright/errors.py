"""The errors a user can cause. Everything else that is raised is a bug of ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST_NAME = 80
"""The number of characters of a given value that are compared with what is allowed."""


class TilewrightError(Exception):
    """A user's error, in one line: what was wrong, where, what is allowed. Commands exit with its
    ``exit_code``.
    """

    exit_code = 2


class CheckpointError(TilewrightError):
    """A model's files are missing, cut short, corrupt or of a kind that is not read."""


class ConfigError(TilewrightError):
    """A configuration file or an option has a value that is not allowed."""


class CompileError(TilewrightError):
    """A model, a configuration and a target do not fit together."""


class NoRoomError(CompileError):
    """What was compiled cannot be written: a full disk, a limit, no temporary folder."""


class RankError(TilewrightError):
    """A rank of several has ended, hangs or does not answer: the whole group ends."""

    exit_code = 3


class RankRefusedError(TilewrightError):
    """What was asked for cannot be done, as another rank than this one was the first to say."""


class ExchangeError(RankError):
    """An exchange between ranks has failed: ``rank`` is the one that did not take its part.

    Args:
        said: what it did not do, or did.
        after: how long it was waited for, in words; nothing where it has gone.
    """

    def __init__(self, said: str, rank: int, after: str = "") -> None:
        super().__init__(f"{said} {after}".rstrip())
        self.rank, self._said, self._after = rank, said, after

    def of_step(self, number: int) -> str:
        """What was said, with the step that the exchange belongs to."""
        return f"{self._said} of step {number} {self._after}".rstrip()


class RequestError(TilewrightError):
    """A request cannot be served: a prompt too long, an unknown id, a parameter out of range."""


def one_line(error: BaseException, length: int = 200) -> str:
    """What an error of a library says, fit for a message of ours: one printable line, cut."""
    text = " ".join(str(error).split())[:length] or type(error).__name__
    return text if text.isprintable() else repr(text)


def allowed(values: Iterable[object], given: object = None) -> str:
    """The tail of a message that lists what is allowed: ``allowed: a, b, c``.

    Where the name ``given`` instead is close to one of them, that one is proposed:
    ``allowed: a, b, c; did you mean 'b'?``.
    """
    names = [str(value) for value in values]
    close = []
    if isinstance(given, str):
        close = get_close_matches(given[:_LONGEST_NAME].lower(), names, n=1)
    return "allowed: " + ", ".join(names) + "".join(f"; did you mean {name!r}?" for name in close)
