"""Argument parsing shared by the commands: one-line errors, checked types, options of a model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from compiler.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are :class:`ConfigError`, so that they print as one line."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def integer(least: int, most: int | None = None) -> Callable[[str], int]:
    """A type for ``add_argument``: integers from ``least`` to ``most``."""
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
    """A type for ``add_argument``: numbers from (or above) ``least`` to ``most``."""
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


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, where it runs and how precisely."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="PATH",
        help="a Hugging Face folder, a GGUF file, or smollm2 (default: smollm2)",
    )
    group.add_argument("--target", help="reference, null or cpu (default: cpu)", default="cpu")
    group.add_argument(
        "--precision",
        metavar="NAME",
        help="a name in precision_cfgs/, a YAML or JSON file, or a heading (default: the case's)",
    )
    group.add_argument(
        "--compute",
        choices=("fast", "exact"),
        default="fast",
        help="exact: float arithmetic everywhere, no speed claim (default: fast)",
    )
    group.add_argument("--threads", type=integer(1, 1024), help="CPU threads (default: all cores)")
