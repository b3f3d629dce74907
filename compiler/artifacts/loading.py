"""Running what lies in a compiled folder. Imports no torch where the target needs none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.compiler.artifacts.folder import read_file
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.rank_programs import as_compiled, own_part
from tilewright.compiler.targets.interface.base import CompileOptions, Program, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.table import get_target

if TYPE_CHECKING:
    from torch.fx import GraphModule

GRAPH = "graph.json"


def load_program(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress = silent
) -> Compiled:
    """The executable of a folder that `open_folder` found sound; its ``compute`` is the folder's.

    Of a folder for several ranks it is the program of ``options.rank``.

    Raises:
        CheckpointError: for files that are not what the target wrote.
        ConfigError, CompileError: for options that the program does not serve.
    """
    return load_part(own_part(folder, manifest, options), manifest, options, progress)


def load_part(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress
) -> Compiled:
    """`load_program` of the folder that a program itself lies in."""
    options = as_compiled(manifest, options)
    check_options(options, manifest.model.max_positions)

    path = folder / GRAPH
    data = read_file(path)  # now: an entry of the cache may be gone when the graph is asked for

    def graph() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path)

    def sketch() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path, is_fixed=True)

    program = Program(folder, manifest.contract, graph, sketch)
    executable = get_target(manifest.target).load(program, options, progress)
    return Compiled(
        executable=executable,
        target=manifest.target,
        compute=manifest.compute,
        precision=manifest.precision,
        notes=manifest.notes,
        graph=graph,
    )
