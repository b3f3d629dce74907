"""``tilewright convert``: write a model as files of dllama, or into the program cache."""

from __future__ import annotations

import argparse
import re
import shlex
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.cli.terminal.notes import without_details
from tilewright.compiler.artifacts.paths import cache_dir
from tilewright.errors import ConfigError, NoRoomError, allowed
from tilewright.models import check_header, find_model
from tilewright.options.arguments import (
    Parser,
    add_options,
    names_of,
    option,
    output_folder,
    refuse_given,
)
from tilewright.options.config_file import (
    OutputArguments,
    PathArguments,
    read_checkpoint_config,
)
from tilewright.options.engine_config import MODEL, SINGLE, EngineConfig
from tilewright.options.resolve import resolve

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import Progress
    from tilewright.models import LoadedModel

_WEIGHTS = {"q40": "Q4_0", "f32": "F32"}
"""Types in file names of dllama, and their names in ggml."""
_USUAL_WEIGHTS = "q40"
_RUN_AS = {"q40": "stored", "f32": "accuracy"}
"""Suggested configuration per type. ``stored`` keeps q40 weights."""
_OF_CACHE = ("target", "precision", "compute")
_OF_DLLAMA = ("output", "weights")
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ConvertArgs:
    to: str = option(
        "dllama: a .m and a .t file. cache: the compiled program in the cache. gguf: a copy of the "
        "original GGUF file with the q40, q50 or q80 weights of a calibrated directory",
        default="dllama",
        choices=("dllama", "cache", "gguf"),
    )
    original: str | None = option(
        "original GGUF file of the calibrated directory, for --to gguf", metavar="FILE"
    )
    verbose: bool = option("print the notes of the compiler", "-v", "--verbose", default=False)
    weights: str | None = option(
        f"type of the matrices, for --to dllama (default: {_USUAL_WEIGHTS})",
        choices=tuple(_WEIGHTS),
    )


def main(argv: list[str]) -> int:
    """Run ``tilewright convert``. Return the exit code."""
    parser = Parser(
        prog="tilewright convert", description="Write a model for dllama, or into the cache."
    )
    add_options(parser, PathArguments, OutputArguments, _ConvertArgs)
    add_options(parser, EngineConfig, only=names_of(EngineConfig, MODEL))
    arguments = parser.parse_args(argv)
    if arguments.dump is not None:
        raise ConfigError("--dump with convert; allowed: with tilewright compile")
    if arguments.to == "gguf":
        refuse_given(arguments, (*_OF_CACHE, "weights"), "--to gguf; allowed: without --{name}")
        return _to_gguf(arguments, read_checkpoint_config(arguments))
    refuse_given(arguments, ("original",), f"--to {arguments.to}; allowed: --to gguf")
    names, other = (_OF_CACHE, "cache") if arguments.to == "dllama" else (_OF_DLLAMA, "dllama")
    said = f"--to {arguments.to}; allowed: without --{{name}}, or --to {other}"
    refuse_given(arguments, names, said)
    config = read_checkpoint_config(arguments, SINGLE)
    if arguments.to == "dllama":
        return _to_dllama(arguments, config)
    return _to_cache(config, is_verbose=arguments.verbose)


def _to_dllama(arguments: argparse.Namespace, config: EngineConfig) -> int:
    output = output_folder(arguments.output)
    path = find_model(config.model)
    check_header(path)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.cli.terminal.console import compile_progress, err, out, print_files
    from tilewright.compiler.artifacts.folder import fresh_folder
    from tilewright.models import load_model

    with fresh_folder(output) as folder:
        model = load_model(path)
        with compile_progress(err()) as progress:
            _write_dllama(model, folder, arguments.weights or _USUAL_WEIGHTS, progress)
    screen = out()
    print_files(screen, output)
    weights = arguments.weights or _USUAL_WEIGHTS
    command = f"tilewright run {shlex.quote(str(output))} --precision {_RUN_AS[weights]}"
    screen.print(f"run it here: {command}", soft_wrap=True)
    return 0


def _write_dllama(model: LoadedModel, folder: Path, weights: str, progress: Progress) -> None:
    """Write both files with dllama's names and token ids in dllama's order."""
    from tilewright.compiler.artifacts.folder import write_file
    from tilewright.compiler.formats import get_format
    from tilewright.models.checkpoints.dllama.writer import write_model
    from tilewright.models.tokenizer.load import read_vocabulary
    from tilewright.models.tokenizer.vocabulary_dllama import pack_tokenizer, token_order

    name = _NOT_IN_NAMES.sub("_", model.name)
    vocabulary = read_vocabulary(model.checkpoint.tokenizer_source)
    write_file(folder / f"dllama_tokenizer_{name}.t", pack_tokenizer(vocabulary))
    path = folder / f"dllama_model_{name}_{weights}.m"
    try:
        with path.open("wb") as file:
            write_model(
                model.checkpoint,
                file,
                weights=_WEIGHTS[weights],
                pack_q40=get_format("q40").pack,
                progress=progress,
                token_order=token_order(vocabulary),
            )
    except OSError as error:
        raise NoRoomError(
            f"{path.name}: cannot be written ({error.strerror}); allowed: a folder with room for it"
        ) from None


def _to_gguf(arguments: argparse.Namespace, config: EngineConfig) -> int:
    output = output_folder(arguments.output)
    if arguments.original is None:
        raise ConfigError("--to gguf without --original; allowed: --original FILE.gguf")
    paths = find_model(config.model), find_model(arguments.original)
    for path in paths:
        check_header(path)
    from tilewright.cli.terminal.console import compile_progress, err, out, print_files
    from tilewright.compiler.artifacts.folder import fresh_folder
    from tilewright.models.checkpoints.calibrated.checkpoint import CalibratedCheckpoint
    from tilewright.models.checkpoints.containers import open_checkpoint
    from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
    from tilewright.models.checkpoints.gguf.replacement import write_replacement

    calibrated, original = map(open_checkpoint, paths)
    if not isinstance(calibrated, CalibratedCheckpoint):
        raise ConfigError(f"{paths[0]}: is not calibrated; allowed: a folder of calibrate")
    if not isinstance(original, GGUFCheckpoint):
        raise ConfigError(f"--original {paths[1]}: allowed: a .gguf file")
    name = _NOT_IN_NAMES.sub("_", calibrated.facts.model) + "-calibrated.gguf"
    with fresh_folder(output) as folder, compile_progress(err()) as progress:
        try:
            with (folder / name).open("wb") as file:
                write_replacement(original, calibrated, file, progress)
        except OSError as error:
            raise NoRoomError(f"{name}: cannot be written ({error.strerror})") from None
    print_files(out(), output)
    return 0


def _to_cache(config: EngineConfig, *, is_verbose: bool) -> int:
    find_model(config.model)  # a shape has no files for a cache key
    options = resolve(config)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.api import compile, load
    from tilewright.cli.terminal.console import compile_progress, err, note, out
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.compiler.targets.table import get_target

    if not get_target(options.target).is_cached:
        raise ConfigError(
            f"target {options.target!r} keeps nothing in the cache, for it has little to build; "
            + allowed(("cpu",))
        )
    _check_cache()
    source = load(options.path)
    note(err(), *source.notes)
    context = min(CompileOptions().max_context, source.max_positions)
    with compile_progress(err()) as progress:
        compiled = compile(source, options.changed(max_model_len=context), progress=progress)
    note(err(), *without_details(compiled.notes, is_verbose=is_verbose))
    out().print(f"{source.name} for {compiled.target}, {compiled.precision.name}: in the cache")
    compiled.executable.close()
    return 0


def _check_cache() -> None:
    """Check that the cache is writable before compiling.

    Raises:
        ConfigError: if the cache is not writable. The message names its directory.
    """
    place = cache_dir()
    try:
        (place / "programs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the cache {place} cannot be used ({error.strerror})") from None
