"""Loading of compiled directories. Imports no torch unless the target needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.compiler.artifacts.folder import read_file
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.rank_programs import as_compiled, own_part
from tilewright.compiler.targets.interface.base import BuiltProgram, CompileOptions, Progress
from tilewright.compiler.targets.interface.compiled import Compiled, check_options, silent
from tilewright.compiler.targets.table import get_target

if TYPE_CHECKING:
    from torch.fx import GraphModule

GRAPH = "graph.json"


def load_program(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress = silent
) -> Compiled:
    """Return the executable of a directory checked by `open_folder`. ``compute`` is the
    directory's.

    For several ranks, load the program of ``options.rank``.

    Raises:
        CheckpointError: The files were not written by the target.
        ConfigError, CompileError: The program does not support the options.
    """
    return load_part(own_part(folder, manifest, options), manifest, options, progress)


def load_part(
    folder: Path, manifest: Manifest, options: CompileOptions, progress: Progress
) -> Compiled:
    """Run `load_program` on the program's own directory."""
    options = as_compiled(manifest, options)
    check_options(options, manifest.model.max_positions)

    path = folder / GRAPH
    data = read_file(path)  # read early: the cache entry may be deleted later

    def graph() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path)

    def sketch() -> GraphModule:
        from tilewright.compiler.ir.serialise import read_graph

        return read_graph(data, path, is_fixed=True)

    program = BuiltProgram(folder, manifest.contract, graph, sketch)
    executable = get_target(manifest.target).load(program, options, progress)
    return Compiled(
        executable=executable,
        target=manifest.target,
        compute=manifest.compute,
        precision=manifest.precision,
        notes=manifest.notes,
        graph=graph,
    )
