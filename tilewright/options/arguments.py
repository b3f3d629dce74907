"""Command line options declared by dataclass fields, with one-line errors and checked types."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tilewright.errors import ConfigError, allowed
from tilewright.utils.files import check_fresh

_OPTION = "option"
_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises :class:`ConfigError`.

    A doubled option is an error. With ``last_wins``, the last value is used.
    """

    def __init__(self, *args: Any, last_wins: bool = False, **words: Any) -> None:
        super().__init__(*args, **words)
        if not last_wins:
            self.register("action", None, _Once)  # for arguments without an action

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a type for ``add_argument``: integers from ``least`` to ``most``."""
    span = f"{least} to {most}" if most is not None else f"{least} or more"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: integers, {span}")
        return value

    return parse


def real(least: float, most: float, *, above: bool = False) -> Callable[[str], float]:
    """Return a type for ``add_argument``: numbers from (or above) ``least`` to ``most``."""
    span = f"{'above ' if above else ''}{least:g} to {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        inside = value > least if above else value >= least
        if not (inside and value <= most):
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers, {span}")
        return value

    return parse


def numbers(text: str) -> tuple[int, ...]:
    """Convert whole numbers separated by commas, as a type for ``add_argument``."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers, as 0,1") from None


@dataclass(frozen=True, slots=True)
class Option:
    """A command line option's declaration.

    Attributes:
        text: Help text.
        flags: Spellings in the help. Empty: ``--`` and the field's name.
        group: Heading in the help.
        aliases: Older spellings. The help omits them.
        renamed: Older values and their replacements.
        words: Further arguments of ``add_argument``.
    """

    text: str
    flags: tuple[str, ...]
    group: str
    aliases: tuple[str, ...]
    renamed: Mapping[str, str]
    words: Mapping[str, Any]

    def read(self, text: str) -> Any:
        """Convert a value's text.

        Raises:
            argparse.ArgumentTypeError: for a text that is not allowed.
        """
        text = self.renamed.get(text, text)
        value = self.words.get("type", str)(text)
        choices = self.words.get("choices")
        if choices is not None and value not in choices:
            raise argparse.ArgumentTypeError(f"{text!r}; {allowed(choices, text)}")
        return value


def option(
    text: str,
    *flags: str,
    default: Any = None,
    group: str = "",
    aliases: Sequence[str] = (),
    renamed: Mapping[str, str] | None = None,
    **words: Any,
) -> Any:
    """Declare a dataclass field as an option. See `Option` for the arguments.

    A flag without a dash is a positional argument. ``default`` is the default of the field and the
    option. False declares a switch, True a switch with ``--no-``. A tuple declares an option with
    one or more values.
    """
    if default is True:
        words = {"action": OnOff, **words}
    made = Option(text, flags, group, tuple(aliases), renamed or {}, words)
    return field(default=default, metadata={_OPTION: made})


def add_options(
    parser: argparse.ArgumentParser,
    *kinds: type,
    without: Sequence[str] = (),
    only: Sequence[str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add the options declared by the dataclass fields.

    Args:
        without: Field names to omit.
        only: Names of fields to add. None: all.
        defaults: Default values that differ from those of the fields.
    """
    groups: dict[str, Any] = {"": parser}
    for name, (made, default) in _declared_of(kinds).items():
        if name in without or (only is not None and name not in only):
            continue
        if made.group not in groups:
            groups[made.group] = parser.add_argument_group(made.group)
        words, flags = _words(made, default), made.flags or ("--" + name.replace("_", "-"),)
        if flags[0].startswith("-"):
            words = {"dest": name, **words}
            if words.get("nargs") in ("+", "*"):
                words = {"action": _Extend, **words}
        chosen = (defaults or {}).get(name, default)
        action = groups[made.group].add_argument(*flags, default=chosen, help=made.text, **words)
        for alias in made.aliases:
            parser._option_string_actions[alias] = action


def _words(made: Option, default: Any) -> dict[str, Any]:
    """Return the arguments of ``add_argument`` for a declaration."""
    words = dict(made.words)
    if made.renamed:
        convert, renamed = words.get("type", str), made.renamed
        words["type"] = lambda text: convert(renamed.get(text, text))
    if default is False:
        return {"action": "store_true", **words}
    return {"nargs": "+", **words} if isinstance(default, tuple) else words


class _Once(argparse.Action):
    """Stores an option's value. A second value is an error."""

    _last: argparse.Namespace | None = None

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Set the value (called by argparse)."""
        if option_string is not None and self._last is namespace:
            raise argparse.ArgumentError(self, "given twice; allowed: once")
        self._last = namespace if option_string is not None else None
        self.set_value(namespace, values, option_string or "")

    def set_value(self, namespace: argparse.Namespace, values: Any, flag: str) -> None:
        """Store ``values`` for the typed ``flag``."""
        setattr(namespace, self.dest, values)


class OnOff(_Once, argparse.BooleanOptionalAction):
    """A switch with ``--name`` and ``--no-name``."""

    def set_value(self, namespace: argparse.Namespace, values: Any, flag: str) -> None:
        """Store whether ``flag`` is ``--name``."""
        setattr(namespace, self.dest, not flag.startswith("--no-"))


class _Extend(argparse.Action):
    """Appends a repeated option's values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Append ``values`` (called by argparse)."""
        earlier = getattr(namespace, self.dest)
        known = () if earlier is None or earlier is self.default else earlier
        setattr(namespace, self.dest, [*known, *values])


def values_of(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the ``kind`` options by field. Several values are a tuple."""
    values = {n: getattr(arguments, n) for n in declared(kind) if hasattr(arguments, n)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def words_of(kind: type, name: str) -> dict[str, Any]:
    """Return an option's arguments for ``add_argument``, without flags, help and group."""
    return dict(declared(kind)[name].words)


def names_of(record: type, *groups: str) -> list[str]:
    """Return the option names of ``record`` in the help's groups."""
    return [name for name, made in declared(record).items() if made.group in groups]


def declared(record: type) -> dict[str, Option]:
    """Return the ``record`` options by field."""
    return {name: made for name, (made, _) in _declared_of((record,)).items()}


def _declared_of(records: Sequence[type]) -> dict[str, tuple[Option, Any]]:
    values = [entry for record in records for entry in fields(record) if _OPTION in entry.metadata]
    return {entry.name: (entry.metadata[_OPTION], entry.default) for entry in values}


def parse(kind: type[_T], argv: Sequence[str], *, prog: str, description: str) -> _T:
    """Read an option dataclass from a command line.

    Raises:
        ConfigError: for an unknown option or an invalid value.
    """
    parser = Parser(prog=prog, description=description)
    add_options(parser, kind)
    return kind(**values_of(kind, parser.parse_args(list(argv))))


def check_text(text: str, what: str) -> None:
    """Check that the command line has decoded a text. Raises ConfigError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid UTF-8; allowed: UTF-8 text") from None


def read_prompt(given: str) -> str:
    """Return a prompt of the command line. ``-`` reads standard input.

    Raises:
        ConfigError: if the prompt is empty or not text.
    """
    if given == "-":
        try:
            given = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text"
            ) from None
    check_text(given, "the prompt")
    if not given.strip():
        raise ConfigError("the prompt is empty; allowed: some text")
    return given


def refuse_given(arguments: object, names: Sequence[str], said: str) -> None:
    """Raise for options that have no effect with the other options.

    ``said`` follows ``--name with`` in the message. ``{name}`` in it is the option's name.

    Raises:
        ConfigError: for the first given option in ``names``.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} with {said.format(name=flag)}")


def output_folder(named: str | None) -> Path:
    """Return the directory of ``--output``.

    Raises:
        ConfigError: if the directory is absent from the options, or not empty.
    """
    if not named:
        raise ConfigError("no folder to write to; allowed: -o DIR, a new or empty one")
    try:
        path = Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{named}: cannot be made ({error})") from None
    check_fresh(path)  # early, because the next step takes seconds
    return path
