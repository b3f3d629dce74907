"""Argument parsing shared by the commands: one-line errors, checked types, options of a model."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tilewright.compiler.artifacts.places import is_compiled
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.passes.dumps import dump_folder
from tilewright.compiler.precision import PrecisionConfig, load_precision
from tilewright.models import FoundModel, find_model_or_shape

_TARGETS = ("reference", "null", "cpu", "cuda", "n150", "n300", "t3k", "tg")


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
        help="a Hugging Face folder, a GGUF file, a name on the Hugging Face hub "
        "(OWNER/NAME[@REVISION][:FILE.gguf]), smollm2, or shape:NAME for random weights of a "
        "known shape, as shape:llama-3.1-8b (default: smollm2)",
    )
    group.add_argument(
        "--target",
        help="reference, null, cpu, cuda, or an emulated board: n150, n300, t3k, tg (default: cpu)",
    )
    group.add_argument(
        "--precision",
        metavar="NAME",
        help="a name in precision_cfgs/, a YAML or JSON file, or a heading (default: the case's)",
    )
    group.add_argument(
        "--compute",
        choices=("fast", "exact"),
        help="exact: float arithmetic everywhere, no speed claim (default: fast)",
    )
    group.add_argument("--dump", metavar="DIR", help="write the graph after every pass here")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """The checked options of :func:`add_model_options`.

    ``precision`` is None for a compiled folder, which has its own.
    """

    path: FoundModel
    target: str
    compute: str
    precision: PrecisionConfig | None
    dump_dir: Path | None


def read_model_options(arguments: argparse.Namespace, default_precision: str) -> ModelOptions:
    """Check them without the model; a hub name is fetched.

    Raises:
        TilewrightError: an unknown target or configuration, no model, or choices that a compiled
            folder has already made.
    """
    target = arguments.target or "cpu"
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; allowed: {', '.join(_TARGETS)}")
    if arguments.model is not None and is_compiled(arguments.model):
        return _folder_options(arguments, Path(arguments.model).expanduser(), target)
    precision = load_precision(arguments.precision or default_precision)
    dump_dir = dump_folder(None if arguments.dump is None else Path(arguments.dump))
    return ModelOptions(
        path=find_model_or_shape(arguments.model),
        target=target,
        compute=arguments.compute or "fast",
        precision=precision,
        dump_dir=dump_dir,
    )


def _folder_options(arguments: argparse.Namespace, path: Path, target: str) -> ModelOptions:
    for option in ("target", "precision", "compute", "dump"):
        if getattr(arguments, option) is not None:
            raise ConfigError(
                f"--{option} with the compiled folder {path}, which was compiled with its own; "
                f"allowed: without --{option}, or compile the checkpoint again"
            )
    return ModelOptions(path=path, target=target, compute="fast", precision=None, dump_dir=None)
