"""``tilewright compile``: write a directory to run without the checkpoint, or an export.

The exports are ONNX, MLIR, ttnn and an engine.
"""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.cli.commands import generate_engine
from tilewright.cli.terminal.notes import RANDOM_NOTE, without_details
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.compiler.devices import check_triton
from tilewright.distributed.grouping import read_grouping
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import (
    Parser,
    add_options,
    integer,
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
from tilewright.options.engine_config import MODEL, EngineConfig
from tilewright.options.resolve import ResolvedConfig, resolve

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from tilewright.compiler.targets.interface.base import Progress, Stage, Target
    from tilewright.models import LoadedModel

_FLOAT = "reference"
_ENGINES = "cuda"
_DIALECTS = ("torch", "linalg")
_CONTEXT = 2048
_USES = {
    "program": "run it: tilewright run {}",
    "onnx": 'run it without Tilewright: python {}/generate.py "Why is the sky blue?"',
    "mlir": "{}/arguments.json says which tensors to feed, in order",
    "engine": "check it: python {0}/engine.py --self-test --config {0}/model_config.json "
    "--weights {0}/weights",
    "ttnn": 'run it where ttnn and the board are: python {}/model.py --run-on-device --prompt "Hi"',
}
_WRITTEN = "what is written"
_SPLITS = ("tensor_parallel_size", "expert_parallel_size", "tensor_split", "comm_dtype")
"""Rank options with an effect on a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CompileArgs:
    emit: str = option(
        "program (directory for --model DIR), onnx (plain onnxruntime), mlir (from torch-mlir), "
        "ttnn (Python file for a Tenstorrent board) or engine (Python file for torch and Triton)",
        default="program",
        group=_WRITTEN,
        choices=tuple(_USES),
    )
    explain: bool = option("print bytes by group and the notes of the compiler", default=False)
    verbose: bool = option("print the notes of the compiler", "-v", "--verbose", default=False)
    dialect: str | None = option(
        "dialect for --emit mlir: torch or linalg (default: linalg)", group=_WRITTEN
    )
    length: int | None = option(
        "number of tokens for --emit mlir (default: any number)",
        group=_WRITTEN,
        type=integer(1, 1 << 24),
    )
    users: int | None = option(
        "concurrent users for --emit ttnn (default: 1)", group=_WRITTEN, type=integer(1, 32)
    )
    context: int | None = option(
        f"positions per user for --emit ttnn (default: {_CONTEXT}, at most the model's limit)",
        group=_WRITTEN,
        type=integer(1, 1 << 24),
    )


def main(argv: list[str]) -> int:
    """Run ``tilewright compile``. Return the exit code."""
    if generate_engine.has_options(argv):
        return generate_engine.main(argv)
    arguments = _parser().parse_args(argv)
    output = output_folder(arguments.output)
    config = read_checkpoint_config(arguments)
    _check_emission(arguments)
    options = _resolved(arguments.emit, config)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.cli.measure.explain import print_memory_estimate
    from tilewright.cli.terminal.console import (
        compile_progress,
        err,
        note,
        out,
        print_files,
    )
    from tilewright.compiler.artifacts.folder import fresh_folder
    from tilewright.loading.program import settle_backend
    from tilewright.models import load_model

    _target_of(arguments.emit, options)
    with fresh_folder(output) as folder:
        model = load_model(options.path)
        if arguments.emit == "program":
            with compile_progress(err()) as progress:
                options = settle_backend(options, progress)
        if arguments.explain and arguments.emit in ("program", "onnx"):
            context = min(_CONTEXT, model.config.max_positions)
            print_memory_estimate(err(), model, options, batch=1, context=context)
        with compile_progress(err()) as progress:
            if arguments.emit == "program":
                notes = _write_program(model, options, folder, progress)
            else:
                notes = _emit(model, options, arguments, folder, progress)
    screen = out()
    is_verbose = arguments.verbose or arguments.explain
    note(err(), *without_details((*options.notes, *notes), is_verbose=is_verbose))
    if model.weights == "random":
        note(screen, RANDOM_NOTE.format(model.name))
    print_files(screen, output)
    screen.print(_use_of(arguments.emit, output, options), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tilewright compile",
        description="Compile a model into a directory. Other options: "
        "tilewright compile --config FILE --help (select the fastest of several engine.py files).",
    )
    add_options(parser, PathArguments, OutputArguments, _CompileArgs)
    add_options(parser, EngineConfig, only=(*names_of(EngineConfig, MODEL), *_SPLITS))
    return parser


def _resolved(emit: str, config: EngineConfig) -> ResolvedConfig:
    """Resolve the model and its target. Check the libraries for writing."""
    if emit == "engine" and config.target is None:
        config = replace(config, target=_ENGINES)
    options = replace(resolve(config, runs=False), grouping=read_grouping(config))
    chosen = options.on_onnxruntime if emit == "onnx" and options.is_auto else None
    if chosen is not None:
        options = replace(options, precision=chosen.precision, notes=(chosen.reason,))
    options.check_ranks()
    if options.target == "cuda":
        check_triton()  # writing needs the sources of Triton, but no GPU
    return options


def _use_of(emit: str, output: Path, options: ResolvedConfig) -> str:
    """Return a line about the use of the written files."""
    use, ranks = _USES[emit].format(shlex.quote(str(output))), options.grouping.parallel.tensor
    return use if ranks == 1 else f"{use} --tensor-parallel-size {ranks}"


def _check_emission(arguments: argparse.Namespace) -> None:
    emit = arguments.emit
    if emit != "mlir":
        refuse_given(arguments, ("dialect", "length"), f"--emit {emit}; allowed: --emit mlir")
    elif arguments.dialect not in (None, *_DIALECTS):
        raise ConfigError(f"dialect {arguments.dialect!r} is not emitted; {allowed(_DIALECTS)}")
    else:
        refuse_given(
            arguments,
            ("target", "precision", "compute"),
            "--emit mlir, which is the model before precision and target; allowed: without "
            "--{name}",
        )
    if emit == "engine":
        refuse_given(
            arguments,
            ("precision", "compute"),
            "--emit engine, which computes in 16 bits as plain torch does; allowed: without "
            "--{name}",
        )
    if emit != "program":
        refuse_given(arguments, _SPLITS, f"--emit {emit}; allowed: --emit program")
    if emit != "ttnn":
        refuse_given(arguments, ("users", "context"), f"--emit {emit}; allowed: --emit ttnn")


def _target_of(emit: str, options: ResolvedConfig) -> Target:
    """Return the target that writes. MLIR is the model before target passes."""
    from tilewright.compiler.targets.table import get_target

    target = get_target(_FLOAT if emit == "mlir" else options.target)
    target.check_emits(emit)
    return target


def _write_program(
    model: LoadedModel, options: ResolvedConfig, folder: Path, progress: Progress
) -> tuple[str, ...]:
    """Write a directory for ``tilewright run``. Return the compiler's notes."""
    from tilewright.compiler.artifacts.folder import seal_folder
    from tilewright.compiler.artifacts.program import write_program, write_ranks
    from tilewright.loading.source import TOKENIZER
    from tilewright.models.tokenizer.saved import save

    assert options.precision is not None
    how: Any = {
        "target": options.target,
        "compute": options.compute,
        "progress": progress,
        "dump_dir": options.dump_dir,
    }
    if options.grouping.is_alone:
        manifest = write_program(model, options.precision, folder, **how)
    else:
        parallel = options.grouping.parallel
        manifest = write_ranks(model, options.precision, folder, parallel=parallel, **how)
    save(model.tokenizer, folder / TOKENIZER)
    seal_folder(folder, manifest, digest_memory())
    return manifest.notes


def _emit(
    model: LoadedModel,
    options: ResolvedConfig,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    """Write another export with its target, and the tokenizer if the export can run."""
    from tilewright.compiler.artifacts.folder import write_file
    from tilewright.compiler.driver import (
        constants_of,
        lower_model,
        resolve_precision,
        weight_source,
    )
    from tilewright.compiler.precision import load_precision
    from tilewright.compiler.targets.interface.base import CompileOptions, Emission
    from tilewright.loading.source import TOKENIZER

    kind, longest = arguments.emit, model.config.max_positions
    for name in ("length", "context"):
        if (given := getattr(arguments, name) or 1) > longest:
            raise ConfigError(f"--{name} {given}; allowed by this model: 1 to {longest}")
    precision = (options.precision if kind != "engine" else None) or load_precision(_FLOAT)
    resolved, notes = resolve_precision(model, precision), list[str]()
    how: Any = {"dump_dir": options.dump_dir, "block_axis": _target_of(kind, options).block_axis}

    def lower(stages: Sequence[Stage]) -> GraphModule:
        found, ctx = lower_model(model, resolved, stages, progress, **how)
        notes.extend(ctx.notes)
        return found

    context = arguments.context or (min(_CONTEXT, longest) if kind == "ttnn" else longest)
    emission = Emission(
        lower=lower,
        get_weight=weight_source(model),
        constants=lambda: constants_of(model),
        write=lambda name, data: write_file(folder / name, data),
        folder=folder,
        options=CompileOptions(arguments.users or 1, context, options.compute),
        title=f"{model.name}, precision {precision.name}",
        progress=progress,
        settings=_settings(model, arguments),
    )
    _target_of(kind, options).emit(kind, emission)
    if kind != "mlir":
        model.tokenizer.save(folder / TOKENIZER)
    return tuple(notes)


def _settings(model: LoadedModel, arguments: argparse.Namespace) -> dict[str, object]:
    """Return an export's additional settings, see `emit` of each target."""
    if arguments.emit == "engine":
        from tilewright.loading.engine_config import engine_config

        return {"model_config": engine_config(model.config)}
    return {"dialect": arguments.dialect or "linalg", "length": arguments.length}
