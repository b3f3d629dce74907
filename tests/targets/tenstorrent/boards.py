"""Programs and executables of boards for tests, usually configured, on meshes of any shape."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.tiny import lowered, precision_of
from tilewright.compiler.driver import weight_source
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.tenstorrent import BoardTarget
from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram

OPTIONS = CompileOptions(max_batch=4, max_context=64)


def board_precision(
    weights: str = "bfp8", fidelity: str = "hifi2", **changes: Any
) -> PrecisionConfig:
    """Blocks along out, as boards hold them, and the table in what boards look rows up in."""
    usual = {"embedding": "bf16", "block_axis": "out"}
    return precision_of(weights, fidelity, **(usual | changes))


def board(mesh: Mesh | None = None, name: str = "n150") -> BoardTarget:
    """A board by name, or one with another mesh of its chips."""
    target = BoardTarget(name)
    if mesh is not None:
        target.mesh = mesh
    return target


def programs(
    model: SimpleNamespace,
    mesh: Mesh | None = None,
    *,
    precision: PrecisionConfig | None = None,
    options: CompileOptions = OPTIONS,
    name: str = "n150",
) -> tuple[DeviceProgram, DeviceProgram]:
    """The prefill and the decode program of a model."""
    chosen = precision if precision is not None else board_precision()
    graph_module, _ = lowered(model, target=name, precision=chosen)
    return board(mesh, name).programs(graph_module, options)


def emulated(
    model: SimpleNamespace,
    mesh: Mesh | None = None,
    *,
    precision: PrecisionConfig | None = None,
    options: CompileOptions = OPTIONS,
    name: str = "n150",
) -> Executable:
    """The executable of a model on a mesh."""
    chosen = precision if precision is not None else board_precision()
    graph_module, _ = lowered(model, target=name, precision=chosen)
    return board(mesh, name).compile(
        graph_module, weight_source(model), options, lambda what, done, total: None
    )
