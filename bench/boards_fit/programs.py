"""Counts the work in a step for published models on boards, from a traced period."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tilewright.compiler.mesh import Mesh
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import Phase, PrecisionConfig
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent.lower.graph import lower_program
from tilewright.compiler.targets.tenstorrent.perf.work import InstructionCost, program_work
from tilewright.compiler.tracer import trace
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import RopeConfig

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram

Work = tuple[tuple[InstructionCost, float], ...]
"""Instructions and counts."""


@dataclass(slots=True)
class Programs:
    """Lowers models without weights. Caches graphs by configuration and precision."""

    _traced: dict[str, tuple[GraphModule, int]] = field(default_factory=dict)
    _graphs: dict[tuple[str, str], GraphModule] = field(default_factory=dict)

    def get(
        self,
        config: Mapping[str, Any],
        precision: PrecisionConfig,
        *,
        model: str,
        board: str,
        mesh: Mesh,
        phase: Phase,
        batch: int = 1,
        length: int = 1,
        context: int,
    ) -> tuple[DeviceProgram, float]:
        """Return a step with a period of layers, and the number of periods in the model.

        Args:
            config: Hugging Face configuration.
            model: Model name in the precision configuration.
            context: Attended positions, the step included.
        """
        name = repr(config)
        if name not in self._traced:
            self._traced[name] = _trace_period(config, model)
        graph, period = self._traced[name]
        resolved = precision.resolve(period, model)
        if (name, resolved.id) not in self._graphs:
            graph = copy.deepcopy(graph)
            for stage in get_target(board).stages():
                run_passes(graph, stage.passes, PassContext(resolved), verify=stage.verify)
            self._graphs[name, resolved.id] = graph
        program = lower_program(
            copy.deepcopy(self._graphs[name, resolved.id]),
            device=board,
            mesh=mesh,
            phase=phase,
            batch=batch,
            length=length,
            context=context,
        )
        return program, config["num_hidden_layers"] / period

    def work(self, *given: Any, **named: Any) -> Work:
        """Return a step's work. See :meth:`get`."""
        program, repeats = self.get(*given, **named)
        counts: dict[InstructionCost, float] = Counter()  # type: ignore[assignment]
        for item, work in zip(program.instructions, program_work(program), strict=True):
            counts[work] += 1 if item.layer is None else repeats
        return tuple(counts.items())


def _trace_period(given: Mapping[str, Any], model: str) -> tuple[GraphModule, int]:
    """Return a graph with embedding, a period of layers and head, and its layer count.

    Boards scale rotations for free, so the graph omits this.
    """
    import torch

    config: Any = config_of_hf(dict(given), where=model)
    kinds = getattr(config, "linear_layers", ()) or config.windows or (0,)
    period = next(n for n in (1, 4, 6) if all(kinds[i] == kinds[i % n] for i in range(len(kinds))))
    changes: dict[str, Any] = {"num_layers": period, "tie_embeddings": False}
    for name in ("linear_layers", "windows"):
        if getattr(config, name, ()):
            changes[name] = getattr(config, name)[:period]
    rope = RopeConfig(theta=config.rope.theta, num_rotated=config.rope.num_rotated)
    shallow = dataclasses.replace(config, rope=rope, **changes)
    with torch.device("meta"):
        module: Any = architecture_of(config.model_type).model(shallow)
        return trace(module), period
