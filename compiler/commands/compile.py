"""``tilewright compile``: a model becomes a folder to run without its checkpoint, ONNX or MLIR."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.compiler.artifacts.places import digest_memory
from tilewright.compiler.commands.arguments import (
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
from tilewright.compiler.devices import BOARDS
from tilewright.compiler.errors import ConfigError, allowed

if TYPE_CHECKING:
    from tilewright.compiler.artifacts.manifest import Manifest
    from tilewright.compiler.targets.base import Progress
    from tilewright.models import LoadedModel

DEFAULT_PRECISION = "performance"
_FLOAT = "reference"
_DIALECTS = ("torch", "linalg")
_CONTEXT = 2048
_EXAMPLE = "generate.py"
_BOARD_FILE = "model.py"


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    arguments = _parser().parse_args(argv)
    output = output_folder(arguments.output)
    take_checkpoint(arguments)
    _check_emission(arguments)
    options = read_model_options(arguments, DEFAULT_PRECISION)
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.compiler.artifacts.folder import fresh_folder
    from tilewright.compiler.commands.byte_plan import print_byte_plan
    from tilewright.compiler.commands.console import RANDOM_NOTE, compile_progress, err, out
    from tilewright.models import load_model

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
            notes = _EMITTERS[arguments.emit](model, options, arguments, folder, progress)
    screen = out()
    for note in notes:
        screen.print(note, style="dim")
    if model.weights == "random":
        screen.print(RANDOM_NOTE.format(model.name), style="dim")
    for path in sorted(output.rglob("*")):
        if path.is_file():
            size = f"{path.stat().st_size / 1e6:10,.1f} MB"
            screen.print(f"{size}  {path.relative_to(output)}", soft_wrap=True)
    screen.print(_USES[arguments.emit].format(output), soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    found = Parser(prog="tilewright compile", description="Compile a model into a folder.")
    add_options(found, CheckpointArguments)
    kind = found.add_argument_group("what is written")
    kind.add_argument(
        "--emit",
        choices=tuple(_EMITTERS),
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
        help=f"of --emit ttnn: positions of a user (default: {_CONTEXT})",
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
    elif arguments.target not in BOARDS:
        raise ConfigError(
            f"--emit ttnn for target {arguments.target!r}; allowed: --target {', '.join(BOARDS)}"
        )
    if emit == "onnx" and arguments.target not in (None, "cpu"):
        raise ConfigError(f"--emit onnx for target {arguments.target!r}; allowed: cpu")


def _write(model: LoadedModel, options: ModelOptions, folder: Path, progress: Progress) -> Manifest:
    """The program and the tokenizer; the manifest is not written yet."""
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
    return manifest


def _emit_program(
    model: LoadedModel,
    options: ModelOptions,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    from tilewright.compiler.artifacts.folder import seal_folder

    manifest = _write(model, options, folder, progress)
    seal_folder(folder, manifest, digest_memory())
    return manifest.notes


def _emit_onnx(
    model: LoadedModel,
    options: ModelOptions,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    from tilewright.compiler.artifacts.folder import read_file, write_file
    from tilewright.compiler.artifacts.program import GRAPH
    from tilewright.compiler.targets.cpu import generate

    manifest = _write(model, options, folder, progress)
    (folder / GRAPH).unlink()
    write_file(folder / _EXAMPLE, read_file(Path(generate.__file__)))
    return manifest.notes


def _emit_mlir(
    model: LoadedModel,
    options: ModelOptions,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    from tilewright.compiler.artifacts.folder import write_file
    from tilewright.compiler.driver import constants_of, lower_model, resolve_precision
    from tilewright.compiler.ir.mlir import emit_mlir
    from tilewright.compiler.precision import load_precision
    from tilewright.compiler.targets.pipeline import MATCH

    longest = model.config.max_positions
    if arguments.length is not None and arguments.length > longest:
        raise ConfigError(f"--length {arguments.length}; allowed by this model: 1 to {longest}")
    precision = resolve_precision(model, load_precision(_FLOAT))
    graph_module, _ = lower_model(model, precision, (MATCH,), progress, dump_dir=options.dump_dir)
    emitted = emit_mlir(
        graph_module,
        arguments.dialect or "linalg",
        length=arguments.length,
        constants=constants_of(model),
    )
    write_file(folder / "model.mlir", emitted.text.encode())
    write_file(folder / "arguments.json", emitted.arguments_json().encode())
    return ()


def _emit_ttnn(
    model: LoadedModel,
    options: ModelOptions,
    arguments: argparse.Namespace,
    folder: Path,
    progress: Progress,
) -> tuple[str, ...]:
    from tilewright.compiler.artifacts.folder import write_file
    from tilewright.compiler.driver import lower_model, resolve_precision, weight_source
    from tilewright.compiler.targets.base import CompileOptions
    from tilewright.compiler.targets.table import get_target
    from tilewright.compiler.targets.tenstorrent import BoardTarget
    from tilewright.compiler.targets.tenstorrent.emit_ttnn import (
        emit_ttnn,
        prompt_length,
        write_weights,
    )

    target, precision = get_target(options.target), options.precision
    assert isinstance(target, BoardTarget) and precision is not None
    longest = model.config.max_positions
    context = min(_CONTEXT, longest) if arguments.context is None else arguments.context
    if context > longest:
        raise ConfigError(f"--context {context}; allowed by this model: 1 to {longest}")
    resolved = resolve_precision(model, precision)
    graph_module, ctx = lower_model(
        model, resolved, target.stages(), progress, dump_dir=options.dump_dir
    )
    choices = CompileOptions(
        max_batch=arguments.users or 1, max_context=context, compute=options.compute
    )
    prefill, decode = target.programs(graph_module, choices, length=prompt_length(context))
    title = f"{model.name}, precision {precision.name}"
    write_file(folder / _BOARD_FILE, emit_ttnn(prefill, decode, title=title).encode())
    write_weights(decode, weight_source(model), folder)
    model.tokenizer.save(folder / "tokenizer")
    return tuple(ctx.notes)


_Emitter = Callable[
    ["LoadedModel", ModelOptions, argparse.Namespace, Path, "Progress"], tuple[str, ...]
]
_EMITTERS: Mapping[str, _Emitter] = {
    "program": _emit_program,
    "onnx": _emit_onnx,
    "mlir": _emit_mlir,
    "ttnn": _emit_ttnn,
}
_USES = {
    "program": "run it: tilewright run --model {}",
    "onnx": 'run it without Tilewright: python {}/generate.py "Why is the sky blue?"',
    "mlir": "{}/arguments.json says which tensors to feed, in order",
    "ttnn": 'run it where ttnn and the board are: python {}/model.py --run-on-device --prompt "Hi"',
}
