"""What `tilewright.compile_model` is: the driver's, with targets as users name them."""

from __future__ import annotations

from pathlib import Path

from tilewright.compiler.driver import CompilableModel
from tilewright.compiler.driver import compile_model as compile_full
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.cpu.backend import full_name
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, silent


def compile_model(
    model: CompilableModel,
    precision: PrecisionConfig,
    *,
    target: str = "cpu",
    options: CompileOptions | None = None,
    progress: Progress | None = None,
    dump_dir: Path | None = None,
) -> Compiled:
    """Trace, rewrite, lower and build ``model`` for a target; nothing is kept.

    Args:
        model: what `load_model` returns.
        precision: what `load_precision` returns.
        target: ``cpu`` (the native kernels where they are built or can be, else ONNX Runtime; the
            result's ``target`` says which), ``cpu-native``, ``cpu-onnxruntime``, ``cuda``, a board
            (``n150``, ``n300``, ``t3k``, ``tg``), ``reference`` or ``null``.
        options: batch, context and arithmetic; None: one sequence of 2,048 positions.
        progress: is told ``(what, done, total)`` meanwhile.
        dump_dir: receives the graph after every pass.

    Raises:
        CompileError: where model, precision and target do not fit together.
        CheckpointError: where a tensor is missing or of another shape.
    """
    return compile_full(
        model,
        precision,
        target=full_name(target, progress or silent),
        options=options,
        progress=progress,
        dump_dir=dump_dir,
    )
