"""Programs for the published models on boards, by their sizes.

A single layer is traced and lowered, and counted as often as the model has layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilewright.compiler.mesh import Mesh
from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import PHASES, Phase, PrecisionConfig, load_precision
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent.lower.graph import lower_program
from tilewright.compiler.targets.tenstorrent.target import MESHES
from tilewright.compiler.tracer import trace
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import RopeConfig
from tilewright.models.shapes import SHAPES

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from tilewright.compiler.targets.tenstorrent.program.instructions import DeviceProgram

_ANY_BOARD = "n150"
"""All boards have the same passes. Lowering adds the mesh."""

MIXED = "formats introduced, fidelities named"
AS_INTRODUCED, AS_NAMED = "as introduced", "as named"
READINGS = (MIXED, AS_INTRODUCED, AS_NAMED)
"""Interpretations for the published configurations. The first is in use."""

_ATTENTION_OPS = ("li_qkv", "li_o", "sdpa")
_BFP4_IN_ACCURACY = ("Llama3.1-70B", "Qwen2.5-72B")


PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "Llama3.2-1B": "llama-3.2-1b",
        "Llama3.2-3B": "llama-3.2-3b",
        "Llama3.1-8B": "llama-3.1-8b",
        # Text prompts skip the cross-attention layers in 11B and 90B.
        "Llama3.2-11B": "llama-3.1-8b",
        "Llama3.1-70B": "llama-3.1-70b",
        "Llama3.2-90B": "llama-3.1-70b",
        "Qwen2.5-7B": "qwen2.5-7b",
        "Qwen2.5-72B": "qwen2.5-72b",
        "Phi3.5-mini": "phi-3.5-mini",
        "Phi-3-mini-128k-instruct": "phi-3.5-mini",
    }
)
"""Shape by published model name. Equal sizes have the same shape."""


@dataclass(slots=True)
class Programs:
    """Makes programs. Caches traced graphs by shape, and lowered graphs by configuration."""

    _traced: dict[str, GraphModule] = field(default_factory=dict)
    _graphs: dict[tuple[str, str], GraphModule] = field(default_factory=dict)

    def get(
        self,
        model: str,
        precision: PrecisionConfig,
        *,
        device: str,
        phase: Phase,
        num_replicas: int = 1,
        batch: int = 1,
        length: int = 1,
        context: int,
    ) -> DeviceProgram:
        """Return a published model's step. ``device`` has ``num_replicas`` equal meshes.

        ``context``: attended positions, with the step's own positions.
        """
        assert phase in PHASES
        mesh = MESHES[device]
        if num_replicas > 1:
            mesh = Mesh(mesh.num_chips // num_replicas)
        program = lower_program(
            self._graph(model, precision),
            device=device,
            mesh=mesh,
            phase=phase,
            batch=batch,
            length=length,
            context=context,
        )
        num_layers = SHAPES[PUBLISHED[model]]["num_hidden_layers"]
        assert isinstance(num_layers, int)
        return repeat_layer(program, num_layers)

    def _graph(self, model: str, precision: PrecisionConfig) -> GraphModule:
        shape = PUBLISHED[model]
        resolved = precision.resolve(1, model)
        key = shape, resolved.id
        if key not in self._graphs:
            if shape not in self._traced:
                self._traced[shape] = trace(_one_layer(shape))
            graph = copy.deepcopy(self._traced[shape])
            for stage in get_target(_ANY_BOARD).stages():
                run_passes(graph, stage.passes, PassContext(resolved), verify=stage.verify)
            self._graphs[key] = graph
        return self._graphs[key]


def repeat_layer(program: DeviceProgram, num_layers: int) -> DeviceProgram:
    """Return a one-layer program with its layer's instructions repeated ``num_layers`` times.

    For counts and time estimates only, because the copies share values and weights.
    """
    before = [each for each in program.instructions if each.layer is None]
    layer = [each for each in program.instructions if each.layer is not None]
    assert {each.layer for each in layer} == {0}
    first = program.instructions.index(layer[0])
    repeated = (*before[:first], *(layer * num_layers), *before[first:])
    return dataclasses.replace(program, instructions=repeated)


def published_precision(section: str, model: str, reading: str) -> PrecisionConfig:
    """Return the presumed configuration for a row in the section "accuracy" or another section.

    ``reading`` is in `READINGS`. As named: our configuration of the section's name, with its
    exceptions by model. As introduced: gate and up in bfp4 (in the section "accuracy" for two
    models only), the base elsewhere. Mixed: formats as introduced, fidelities as named.
    """
    named = load_precision("accuracy" if section == "accuracy" else "performance")
    if reading == AS_NAMED:
        return named
    fidelities = {}
    if reading == MIXED:
        of_model = named.resolve(1, model)
        for op in ("li_ff2", *_ATTENTION_OPS):
            for phase in PHASES:
                fidelities[f"{op}_{phase}"] = of_model.fidelity(op, phase)
    is_bfp4 = section != "accuracy" or model in _BFP4_IN_ACCURACY
    fidelities["li_ff1_3"] = "lofi" if is_bfp4 else "hifi2"
    formats = f"ff1_3: {'bfp4' if is_bfp4 else 'bfp8'}"
    settings = ", ".join(f"{key}: {value}" for key, value in fidelities.items())
    return load_precision(f"precision_cfg = {{{formats}}}, fidelity_cfg = {{{settings}}}")


def _one_layer(shape: str) -> Any:
    """Return a shape's single layer with embedding and head, without weights.

    Omits the rotation scaling, because it takes a board no time.
    """
    import torch

    config = config_of_hf(SHAPES[shape], where=shape)
    rope = RopeConfig(theta=config.rope.theta)
    one = dataclasses.replace(config, num_layers=1, rope=rope, tie_embeddings=False)
    with torch.device("meta"):
        return architecture_of(config.model_type).model(one)
