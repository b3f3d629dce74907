"""Argument parsing shared by the commands: one-line errors, checked types, options of a model."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tilewright.compiler.artifacts.paths import is_compiled, target_of
from tilewright.compiler.devices import BOARDS, CPU_BACKENDS, check_gpu, check_ranks, num_gpus
from tilewright.compiler.passes.dumps import dump_folder
from tilewright.compiler.precision import AUTO, PrecisionConfig, load_precision
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES
from tilewright.distributed.grouping import Grouping, check_devices, read_grouping
from tilewright.errors import ConfigError, allowed
from tilewright.models import (
    FoundModel,
    calibrated_precision,
    check_header,
    find_model_or_shape,
    quantised_types,
)
from tilewright.options.default_precision import ChosenPrecision, default_precision
from tilewright.options.known_types import known_types
from tilewright.utils.files import check_fresh

_TARGETS = ("reference", "null", "cpu", "cuda", *BOARDS)
CHECKPOINT_PRECISION = AUTO
PRECISION_FORMS = (
    "a name in precision_cfgs/, a YAML or JSON file, a heading, or auto: stored (weights as the "
    "file has them) for quantized files, with float prefill under 0.5 GB; accuracy for others"
)
_OPTION = "option"
_T = TypeVar("_T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are :class:`ConfigError`, so that they print as one line.

    An option with a single value is an error if it is given twice, but for ``last_wins``: then the
    last value is used.
    """

    def __init__(self, *args: Any, last_wins: bool = False, **words: Any) -> None:
        super().__init__(*args, **words)
        if not last_wins:
            self.register("action", None, _Once)  # of arguments without an action

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


def option(text: str, *flags: str, default: Any = None, group: str = "", **words: Any) -> Any:
    """A field of a dataclass that is an option of a command, said once: `parse` makes the option.

    ``text``: its help. ``flags``: as they are typed; without them ``--`` and the field's name, and
    a flag without a dash is a positional argument. ``default``: of the field and the option; False
    makes a switch, a tuple an option of one or more values. ``group``: the heading in the help.
    ``words``: what else ``add_argument`` is told.
    """
    return field(default=default, metadata={_OPTION: (text, flags, group, words)})


def add_options(parser: argparse.ArgumentParser, *kinds: type, without: Sequence[str] = ()) -> None:
    """Add the options that the fields of dataclasses declare with `option`, but ``without``."""
    groups: dict[str, Any] = {"": parser}
    for each in (one for kind in kinds for one in _declared(kind) if one.name not in without):
        text, flags, group, words = each.metadata[_OPTION]
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        if each.default is False:
            words = {"action": "store_true", **words}
        elif isinstance(each.default, tuple):
            words = {"nargs": "+", **words}
        flags = flags or ("--" + each.name.replace("_", "-"),)
        if flags[0].startswith("-"):
            words = {"dest": each.name, **words}
            if words.get("nargs") in ("+", "*"):
                words = {"action": _Extend, **words}
        groups[group].add_argument(*flags, default=each.default, help=text, **words)


class _Once(argparse.Action):
    """The value of an option. A second one is an error: it would replace the first."""

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
        """Store ``values`` of ``flag``, as it was typed."""
        setattr(namespace, self.dest, values)


class OnOff(_Once, argparse.BooleanOptionalAction):
    """A switch with ``--name`` and ``--no-name``."""

    def set_value(self, namespace: argparse.Namespace, values: Any, flag: str) -> None:
        """Store whether ``flag`` is ``--name``."""
        setattr(namespace, self.dest, not flag.startswith("--no-"))


class _Extend(argparse.Action):
    """Values of an option: further ones are added where it is given again."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add ``values`` to the earlier ones (called by argparse)."""
        earlier = getattr(namespace, self.dest)
        known = () if earlier is self.default else earlier
        setattr(namespace, self.dest, [*known, *values])


def values_of(kind: type, arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given for the options of ``kind``, by field; several values are a tuple."""
    found = {each.name: getattr(arguments, each.name) for each in _declared(kind)}
    return {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}


def words_of(kind: type, name: str) -> dict[str, Any]:
    """What ``add_argument`` is told of an option beside its flags, help and group."""
    found: dict[str, Any] = next(e.metadata[_OPTION][3] for e in _declared(kind) if e.name == name)
    return found


def names_of(kind: type, group: str) -> list[str]:
    """The options of ``kind`` under a heading of the help."""
    return [each.name for each in _declared(kind) if each.metadata[_OPTION][2] == group]


def _declared(kind: type) -> list[Field[Any]]:
    return [each for each in fields(kind) if _OPTION in each.metadata]


def parse(kind: type[_T], argv: Sequence[str], *, prog: str, description: str) -> _T:
    """A dataclass of options, read from a command line.

    Raises:
        ConfigError: for what is no option of ``kind``, or no value of one.
    """
    parser = Parser(prog=prog, description=description)
    add_options(parser, kind)
    return kind(**values_of(kind, parser.parse_args(list(argv))))


def check_text(text: str, what: str) -> None:
    """Refuse what the command line could not decode. Raises ConfigError."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what} is not valid UTF-8; allowed: UTF-8 text") from None


def read_prompt(given: str) -> str:
    """A prompt as the command line has it; ``-`` stands for standard input.

    Raises:
        ConfigError: where it is empty or no text.
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
    """Refuse options that say nothing beside others.

    ``said``: what follows ``--name with``; ``{name}`` in it is the option's name.

    Raises:
        ConfigError: for the first of ``names`` that was given.
    """
    for name in names:
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} with {said.format(name=flag)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArguments:
    """Which model, where it runs and how precisely, as asked; None where nothing was said."""

    model: str | None = option(
        "a Hugging Face folder, a GGUF file, a name on the Hugging Face hub "
        "(OWNER/NAME[@REVISION][:FILE.gguf]), smollm2, or shape:NAME for random weights of a "
        "known shape, as shape:llama-3.1-8b (default: smollm2)",
        group="model",
        metavar="PATH",
    )
    target: str | None = option(
        "reference, null, cpu, cuda, or an emulated board: n150, n300, t3k, tg (default: cpu)",
        group="model",
    )
    backend: str | None = option(
        "of target cpu: native (kernels of our own, built with this machine's C++ compiler), "
        "onnxruntime, or auto, which is native where it can be built, else "
        "onnxruntime (default: auto)",
        group="model",
        choices=(AUTO, *CPU_BACKENDS),
    )
    precision: str | None = option(
        f"{PRECISION_FORMS} (default: the case's)", group="model", metavar="NAME"
    )
    compute: str | None = option(
        "exact: float arithmetic everywhere, no speed claim (default: fast)",
        group="model",
        choices=COMPUTE_MODES,
    )
    dump: str | None = option("write the graph after every pass here", group="model", metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathArguments(ModelArguments):
    """A model, which may be named without ``--model``."""

    path: str | None = option("the same as --model", "path", nargs="?", metavar="PATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointArguments(PathArguments):
    """A checkpoint, and a folder to write to."""

    precision: str | None = option(
        f"{PRECISION_FORMS} (default: {CHECKPOINT_PRECISION})", group="model", metavar="NAME"
    )
    output: str | None = option("a new or empty folder", "-o", "--output", metavar="DIR")


def take_path(arguments: argparse.Namespace) -> None:
    """Let ``arguments.model`` be what `PathArguments` name.

    Raises:
        ConfigError: where two are named.
    """
    if arguments.path is not None and arguments.model is not None:
        raise ConfigError("PATH and --model; allowed: one of them")
    arguments.model = arguments.path or arguments.model


def take_checkpoint(arguments: argparse.Namespace) -> None:
    """Let ``arguments.model`` be what `CheckpointArguments` name.

    Raises:
        ConfigError: where two are named, or a compiled folder.
    """
    take_path(arguments)
    if arguments.model is not None and is_compiled(arguments.model):
        raise ConfigError(f"{arguments.model}: is compiled already; allowed: a checkpoint")


def output_folder(named: str | None) -> Path:
    """The folder that ``--output`` names. Raises ConfigError where there is none, or it is no new
    or empty one.
    """
    if not named:
        raise ConfigError("no folder to write to; allowed: -o DIR, a new or empty one")
    try:
        path = Path(named).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{named}: cannot be made ({error})") from None
    check_fresh(path)  # now: what comes next takes seconds
    return path


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Checked `ModelArguments`; ``precision`` is None for a compiled folder, which has its own, and
    ``target`` is the folder's.
    ``notes``: what was chosen for the user, a line each. ``is_auto``: what runs the target cpu is
    chosen when the model is open; until then it is ONNX Runtime's. ``grouping``: the ranks.
    """

    path: FoundModel
    target: str
    compute: str
    precision: PrecisionConfig | None
    dump_dir: Path | None
    notes: tuple[str, ...] = ()
    is_auto: bool = False
    grouping: Grouping = field(default_factory=Grouping)
    on_onnxruntime: ChosenPrecision | None = None
    """The configuration if ONNX Runtime runs the target cpu. None: ``precision``."""

    def check_ranks(self) -> None:
        """Refuse ranks of a target that has none; of cpu once it is known what runs it.

        Raises:
            ConfigError: with what there is in their place.
        """
        if not self.is_auto:
            check_ranks(self.target, self.grouping.parallel.tensor)


def read_model_options(
    arguments: ModelArguments | argparse.Namespace, default: str, *, runs: bool = True
) -> ModelOptions:
    """Check them with no more of the model than its header; a hub name is fetched.

    Args:
        default: the precision without ``--precision``.
        runs: whether this machine is to run what is compiled, and not only to write it.

    Raises:
        TilewrightError: an unknown target or configuration, a target that this machine cannot
            run, no model or a damaged one, or choices that a compiled folder has already made.
    """
    target = arguments.target or "cpu"
    if target not in _TARGETS:
        raise ConfigError(f"unknown target {target!r}; {allowed(_TARGETS, target)}")
    target = _with_backend(target, arguments.backend)
    grouping = read_grouping(arguments) if runs else Grouping()
    if arguments.model is not None and is_compiled(arguments.model):
        return _of_folder(arguments, Path(arguments.model).expanduser(), grouping)
    is_auto = target == "cpu" and arguments.backend in (None, AUTO)
    if runs:
        _check_devices(target, grouping, is_auto=is_auto)
    named, notes = arguments.precision or default, tuple[str, ...]()
    if named != AUTO:
        load_precision(named)  # a name is checked before a model is fetched
    dump_dir = dump_folder(None if arguments.dump is None else Path(arguments.dump))
    found = find_model_or_shape(arguments.model)
    known = known_types(found)
    if known is None:
        check_header(found)
    on_onnxruntime = None
    if arguments.precision in (None, AUTO) and (own := calibrated_precision(found)) is not None:
        named, notes = own, ("precision: of the calibrated folder",)
    elif named == AUTO:
        types = known or quantised_types(found)
        chosen, on_onnxruntime = default_precision(found, types, target, is_auto=is_auto)
        notes = (chosen.reason,)
    return ModelOptions(
        path=found,
        target=target,
        compute=arguments.compute or "fast",
        precision=chosen.precision if named == AUTO else load_precision(named),
        dump_dir=dump_dir,
        notes=notes,
        is_auto=is_auto,
        grouping=grouping,
        on_onnxruntime=on_onnxruntime,
    )


def _of_folder(
    arguments: ModelArguments | argparse.Namespace, path: Path, grouping: Grouping
) -> ModelOptions:
    """The options for a compiled folder, whose own target says which devices there may be."""
    refuse_given(
        arguments,
        ("target", "backend", "precision", "compute", "dump"),
        f"the compiled folder {path}, which was compiled with its own; allowed: without "
        "--{name}, or compile the checkpoint again",
    )
    target = target_of(path)
    if target is not None:
        _check_devices(target, grouping)
    return ModelOptions(
        path, target or "cpu", "fast", precision=None, dump_dir=None, grouping=grouping
    )


def _check_devices(target: str, grouping: Grouping, *, is_auto: bool = False) -> None:
    devices, exchange = grouping.parallel.devices, grouping.parallel.exchange
    if not is_auto:  # else when it is known what runs the target cpu
        check_ranks(target, grouping.parallel.tensor)
    if target == "cuda":
        check_gpu()
        if not grouping.is_alone or devices:
            check_devices(grouping, num_gpus())
    elif devices:
        listed = ",".join(map(str, devices))
        raise ConfigError(f"--devices {listed}: target {target} has cores; allowed: --target cuda")
    elif exchange is not None:
        raise ConfigError(
            f"--exchange {exchange}: target {target} has one of its own; allowed: --target cuda"
        )


def _with_backend(target: str, backend: str | None) -> str:
    """The full name of a target that something of several runs.

    Raises:
        ConfigError: for a backend of another target.
    """
    if backend is not None and target != "cpu":
        raise ConfigError(f"--backend {backend} with --target {target}; allowed: --target cpu")
    return target if backend in (None, AUTO) else CPU_BACKENDS[backend]
