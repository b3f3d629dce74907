"""``tilewright compile``: a model becomes a folder to run without its checkpoint, ONNX or MLIR."""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.compiler.artifacts.places import digest_memory
from tilewright.compiler.commands.arguments import (
    CHECKPOINT_PRECISION,
    CheckpointArguments,
    ModelOptions,
    Parser,
    add_options,
    integer,
    output_folder,
    read_model_options,
    refuse_given,
    take_checkpoint,
)
from tilewright.compiler.errors import ConfigError, allowed

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from tilewright.compiler.targets.base import Progress, Stage, Target
    from tilewright.models import LoadedModel

_FLOAT = "reference"
_DIALECTS = ("torch", "linalg")
_CONTEXT = 2048


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    output = output_folder(arguments.output)
    take_checkpoint(arguments)
    _check_emission(arguments)
    options = read_model_options(arguments, CHECKPOINT_PRECISION, runs=False)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.compiler.artifacts.folder import fresh_folder
    from tilewright.compiler.commands.byte_plan import print_byte_plan
    from tilewright.compiler.commands.console import RANDOM_NOTE, compile_progress, err, out
    from tilewright.models import load_model

    _target_of(arguments.emit, options)
    with fresh_folder(output) as folder:
        model = load_model(options.path)
        if options.precision is not None and arguments.emit in ("program", "onnx"):
            print_byte_plan(
                err(),
                model,
                options.precision,
                target=options.target,
                batch=1,
                context=min(_CONTEXT, model.config.max_positions),
                compute=options.compute,
            )
        with compile_progress(err()) as progress:
            if arguments.emit == "program":
                notes = _write_program(model, options, folder, progress)
            else:
                notes = _emit(model, options, arguments, folder, progress)
    screen = out()
    for note in (*options.notes, *notes):
        err().print(note, style="dim", soft_wrap=True)
    if model.weights == "random":
        screen.print(RANDOM_NOTE.format(model.name), style="dim")
    for path in sorted(output.rglob("*")):
        if path.is_file():
            size = f"{path.stat().st_size / 1e6:10,.1f} MB"
            screen.print(f"{size}  {path.relative_to(output)}", soft_wrap=True)
    screen.print(_USES[arguments.emit].format(shlex.quote(str(output))), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    found = Parser(prog="tilewright compile", description="Compile a model into a folder.")
    add_options(found, CheckpointArguments)
    kind = found.add_argument_group("what is written")
    kind.add_argument(
        "--emit",
        choices=tuple(_USES),
        default="program",
        help="program: for --model DIR; onnx: for plain onnxruntime; mlir: through torch-mlir; "
        "ttnn: one Python file for a Tenstorrent board",
    )
    kind.add_argument("--dialect", help="of --emit mlir: torch or linalg (default: linalg)")
    kind.add_argument(
        "--length", type=integer(1, 1 << 24), help="of --emit mlir: tokens (default: any number)"
    )
    kind.add_argument(
        "--users", type=integer(1, 32), help="of --emit ttnn: served at once (default: 1)"
    )
    kind.add_argument(
        "--context",
        type=integer(1, 1 << 24),
        help=f"of --emit ttnn: positions of a user (default: {_CONTEXT}, or the model's, if fewer)",
    )
    return found


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
    if emit != "ttnn":
        refuse_given(arguments, ("users", "context"), f"--emit {emit}; allowed: --emit ttnn")


def _target_of(emit: str, options: ModelOptions) -> Target:
    """The target that is asked to write; MLIR is the model before a target has its say."""
    from tilewright.compiler.targets.table import get_target

    target = get_target(_FLOAT if emit == "mlir" else options.target)
    target.check_emits(emit)
    return target


def _write_program(
    model: LoadedModel, options: ModelOptions, folder: Path, progress: Progress
) -> tuple[str, ...]:
    """A folder that ``tilewright run`` takes."""
    from tilewright.compiler.artifacts.folder import seal_folder
    from tilewright.compiler.artifacts.program import write_program
    from tilewright.compiler.commands.source import TOKENIZER

    assert options.precision is not None
    manifest = write_program(
        model,
        options.precision,
        folder,
        target=options.target,
        compute=options.compute,
        progress=progress,
        dump_dir=options.dump_dir,
    )
    model.tokenizer.save(folder / TOKENIZER)
    seal_folder(folder, manifest, digest_memory())
    return manifest.notes


def _emit(
    model: LoadedModel,
    options: ModelOptions,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    """Any other kind, by the target that has it; the tokenizer is beside what can be run."""
    from tilewright.compiler.artifacts.folder import write_file
    from tilewright.compiler.commands.source import TOKENIZER
    from tilewright.compiler.driver import (
        constants_of,
        lower_model,
        resolve_precision,
        weight_source,
    )
    from tilewright.compiler.precision import load_precision
    from tilewright.compiler.targets.base import CompileOptions, Emission

    kind, longest = arguments.emit, model.config.max_positions
    for option in ("length", "context"):
        if (getattr(arguments, option) or 1) > longest:
            raise ConfigError(
                f"--{option} {getattr(arguments, option)}; allowed by this model: 1 to {longest}"
            )
    precision = load_precision(_FLOAT) if options.precision is None else options.precision
    resolved, notes = resolve_precision(model, precision), list[str]()

    def lower(stages: Sequence[Stage]) -> GraphModule:
        found, ctx = lower_model(model, resolved, stages, progress, dump_dir=options.dump_dir)
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
        settings={"dialect": arguments.dialect or "linalg", "length": arguments.length},
    )
    _target_of(kind, options).emit(kind, emission)
    if kind != "mlir":
        model.tokenizer.save(folder / TOKENIZER)
    return tuple(notes)


_USES = {
    "program": "run it: tilewright run {}",
    "onnx": 'run it without Tilewright: python {}/generate.py "Why is the sky blue?"',
    "mlir": "{}/arguments.json says which tensors to feed, in order",
    "ttnn": 'run it where ttnn and the board are: python {}/model.py --run-on-device --prompt "Hi"',
}
