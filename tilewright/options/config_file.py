"""Command options in a YAML file, for ``--config FILE``. A flag replaces a file's value."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.artifacts.paths import is_compiled
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import Parser, add_options, option, values_of
from tilewright.options.engine_config import MODEL, EngineConfig
from tilewright.utils.plain_yaml import parse_yaml, read_text

_FLAG = "--config"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigArguments:
    """The options file."""

    config_file: str | None = option(
        "YAML file with this command's options as keys. A flag replaces its value",
        _FLAG,
        group=MODEL,
        metavar="FILE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PathArguments:
    """A model without ``--model``."""

    path: str | None = option("the same as --model", "path", nargs="?", metavar="PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputArguments:
    """A directory to write."""

    output: str | None = option("a new or empty directory", "-o", "--output", metavar="DIR")


def read_config(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Return the configuration from a parsed command line.

    Args:
        defaults: Values for fields without an option.

    Raises:
        ConfigError: for two models.
    """
    values = {**(defaults or {}), **values_of(EngineConfig, arguments)}
    path = getattr(arguments, "path", None)
    if path is not None and arguments.model is not None:
        raise ConfigError("PATH and --model; allowed: one of them")
    return EngineConfig(**{**values, "model": path or arguments.model})


def read_checkpoint_config(
    arguments: argparse.Namespace, defaults: Mapping[str, Any] | None = None
) -> EngineConfig:
    """Return `read_config` for a checkpoint.

    Raises:
        ConfigError: for two models, or a compiled directory.
    """
    config = read_config(arguments, defaults)
    if config.model is not None and is_compiled(config.model):
        raise ConfigError(f"{config.model}: is compiled already; allowed: a checkpoint")
    return config


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Return the `EngineConfig` fields in a file.

    Raises:
        ConfigError: for an unknown or doubled key, or a wrong value.
    """
    parser = Parser(prog="tilewright", add_help=False)
    add_options(parser, EngineConfig)
    words = [word for entry in _read(parser, str(path)).values() for word in entry.words]
    typed = _typed(parser, words)
    return {n: v for n, v in values_of(EngineConfig, typed).items() if v is not None}


def with_config(
    parser: argparse.ArgumentParser, argv: Sequence[str], *, skips_unknown: bool = False
) -> list[str]:
    """Return a command line with the ``--config`` file's options in place of that flag.

    A value that a flag replaces is named on standard error.

    Args:
        skips_unknown: Whether unknown keys are ignored.

    Raises:
        ConfigError: for a file that is not readable, an unknown or doubled key, or a wrong value.
    """
    finder = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    finder.add_argument(_FLAG)
    parsed, rest = finder.parse_known_args(list(argv))
    if parsed.config is None:
        return list(argv)
    typed, words = vars(_typed(parser, rest)), list[str]()
    if typed.get("path") is not None:
        typed["model"] = typed.get("model") or typed["path"]
    for dest, value in _read(parser, parsed.config, skips_unknown=skips_unknown).items():
        flag = typed.get(dest)
        if flag is None:
            words += value.words
        elif flag != getattr(_typed(parser, value.words), dest):
            text = f"{parsed.config}: {value.key}: replaced by the command line"
            print(f"tilewright: {text}", file=sys.stderr)
    return [*rest, *words]


@dataclass(frozen=True, slots=True)
class _Value:
    """A key in a file, and the same as command line words."""

    key: str
    words: list[str]


def _typed(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Return the values in a command line. None marks an option without a value."""
    nothing = argparse.Namespace(**{entry.dest: None for entry in parser._actions})
    return parser.parse_known_args(list(words), nothing)[0]


def _read(
    parser: argparse.ArgumentParser, path: str, *, skips_unknown: bool = False
) -> dict[str, _Value]:
    """Return the values in a file by option name."""
    values = parse_yaml(read_text(Path(path), source=path), path)
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: no option map; allowed: lines as 'max_num_seqs: 8'")
    actions = parser._option_string_actions
    parsed: dict[str, _Value] = {}
    for key, value in values.items():
        flag = "--" + key.replace("_", "-")
        action = actions.get(flag)
        if action is not None and key.startswith("no_") and not _is_plain_switch(action):
            action = None
        if action is None or action.dest in ("help", "config_file"):
            if skips_unknown:
                continue
            known = [s.removeprefix("--").replace("-", "_") for s in _names(parser)]
            raise ConfigError(f"{path}: unknown key {key!r}; {allowed(known, key)}")
        if action.dest in parsed:
            other = parsed[action.dest].key
            raise ConfigError(f"{path}: {key}: given twice, also as {other}; allowed: once")
        try:
            parsed[action.dest] = _Value(key, _words(parser, action, flag, value))
        except argparse.ArgumentTypeError as error:
            raise ConfigError(f"{path}: {key}: {error}") from None
        except argparse.ArgumentError as error:
            raise ConfigError(f"{path}: {key}: {error.message}") from None
    return parsed


def _json_value(value: object) -> object:
    """Return a YAML value with numbers and booleans instead of texts."""
    if isinstance(value, Mapping):
        return {key: _json_value(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_json_value(entry) for entry in value]
    try:
        return json.loads(str(value))
    except ValueError:
        return value


def _names(parser: argparse.ArgumentParser) -> list[str]:
    """Return each option's first spelling."""
    spellings = [
        [s for s in entry.option_strings if s.startswith("--")] for entry in parser._actions
    ]
    return [entry[0] for entry in spellings if entry and entry[0] not in ("--help", _FLAG)]


def _is_plain_switch(action: argparse.Action) -> bool:
    return action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)


def _words(
    parser: argparse.ArgumentParser, action: argparse.Action, flag: str, value: object
) -> list[str]:
    """Return a value as command line words, after checks."""
    if action.nargs == 0:
        if value not in ("true", "false"):
            raise argparse.ArgumentTypeError(f"{value!r}; allowed: true, false")
        if value == "false":
            return [] if _is_plain_switch(action) else ["--no-" + flag.removeprefix("--")]
        return [flag]
    if isinstance(value, Mapping):
        value = json.dumps(_json_value(value))
    several = action.nargs in ("+", "*")
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) and entry not in ("", "~") for entry in texts):
        raise argparse.ArgumentTypeError(f"{value!r}; allowed: a value, or without the key")
    if isinstance(value, list) and not several:
        texts = [",".join(texts)]
    for text in texts:
        parser._check_value(action, parser._get_value(action, text))
    return [f"{flag}={text}" for text in texts]
