"""Programs of the published models on the boards, by their sizes: one layer is traced and lowered,
and counted as often as the model has layers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilewright.compiler.passes.runner import PassContext, run_passes
from tilewright.compiler.precision import PHASES, Phase, PrecisionConfig, load_precision
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent.lower import lower_program
from tilewright.compiler.targets.tenstorrent.mesh import Mesh
from tilewright.compiler.targets.tenstorrent.target import MESHES
from tilewright.compiler.tracer import trace

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from tilewright.compiler.targets.tenstorrent.program import DeviceProgram

_ANY_BOARD = "n150"
"""The passes are those of every board; the mesh comes in when a graph is lowered."""

MIXED = "formats introduced, fidelities named"
AS_INTRODUCED, AS_NAMED = "as introduced", "as named"
READINGS = (MIXED, AS_INTRODUCED, AS_NAMED)
"""What the published rows' configurations are taken to be; the first is used."""

_ATTENTION_OPS = ("li_qkv", "li_o", "sdpa")
_BFP4_IN_ACCURACY = ("Llama3.1-70B", "Qwen2.5-72B")


@dataclass(frozen=True, slots=True)
class Sizes:
    """A decoder of equal layers, in elements."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    has_bias: bool = False


_8B = Sizes(4096, 32, 32, 8, 128, 14336, 128256)
_70B = Sizes(8192, 80, 64, 8, 128, 28672, 128256)
_PHI_MINI = Sizes(3072, 32, 32, 32, 96, 8192, 32064)

PUBLISHED: Mapping[str, Sizes] = MappingProxyType(
    {
        "Llama3.2-1B": Sizes(2048, 16, 32, 8, 64, 8192, 128256),
        "Llama3.2-3B": Sizes(3072, 28, 24, 8, 128, 8192, 128256),
        "Llama3.1-8B": _8B,
        # A prompt of text passes over the cross-attention layers of 11B and 90B.
        "Llama3.2-11B": _8B,
        "Llama3.1-70B": _70B,
        "Llama3.2-90B": _70B,
        "Qwen2.5-7B": Sizes(3584, 28, 28, 4, 128, 18944, 152064, has_bias=True),
        "Qwen2.5-72B": Sizes(8192, 80, 64, 8, 128, 29568, 152064, has_bias=True),
        "Phi3.5-mini": _PHI_MINI,
        "Phi-3-mini-128k-instruct": _PHI_MINI,
    }
)
"""By their names in the published tables; the sizes are those of the models' config.json."""


@dataclass(slots=True)
class Programs:
    """Makes programs; graphs are kept, traced ones by sizes, lowered ones by configuration too."""

    _traced: dict[Sizes, GraphModule] = field(default_factory=dict)
    _graphs: dict[tuple[Sizes, str], GraphModule] = field(default_factory=dict)

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
        """One step of a published model; ``device`` has ``num_replicas`` meshes of equal size.

        ``context``: positions attended to, the step's own included.
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
        return repeat_layer(program, PUBLISHED[model].num_layers)

    def _graph(self, model: str, precision: PrecisionConfig) -> GraphModule:
        sizes = PUBLISHED[model]
        resolved = precision.resolve(1, model)
        key = sizes, resolved.id
        if key not in self._graphs:
            if sizes not in self._traced:
                self._traced[sizes] = trace(_one_layer(model, sizes))
            graph = copy.deepcopy(self._traced[sizes])
            for stage in get_target(_ANY_BOARD).stages():
                run_passes(graph, stage.passes, PassContext(resolved), verify=stage.verify)
            self._graphs[key] = graph
        return self._graphs[key]


def repeat_layer(program: DeviceProgram, num_layers: int) -> DeviceProgram:
    """A program of one layer with that layer's instructions ``num_layers`` times.

    For counting and pricing alone: the copies share their values and weights.
    """
    before = [each for each in program.instructions if each.layer is None]
    layer = [each for each in program.instructions if each.layer is not None]
    assert {each.layer for each in layer} == {0}
    first = program.instructions.index(layer[0])
    repeated = (*before[:first], *(layer * num_layers), *before[first:])
    return dataclasses.replace(program, instructions=repeated)


def published_precision(section: str, model: str, reading: str) -> PrecisionConfig:
    """The configuration of a row of the section "accuracy" or another, as far as it is known.

    ``reading``: one of `READINGS`. As named: ours of the section's name, with its exceptions by
    model. As introduced: what the tables' introductions say, gate and up in bfp4 (in the section
    "accuracy" for two models only), the base elsewhere. Mixed: formats as introduced, fidelities
    as named.
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


def _one_layer(model: str, sizes: Sizes) -> Any:
    import torch

    from tilewright.models.architectures.llama import LlamaForCausalLM
    from tilewright.models.architectures.qwen2 import Qwen2ForCausalLM
    from tilewright.models.checkpoints.hf_config import config_of_hf

    values = {
        "model_type": "qwen2" if sizes.has_bias else "llama",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    config = config_of_hf(values, where=model)
    with torch.device("meta"):
        return Qwen2ForCausalLM(config) if sizes.has_bias else LlamaForCausalLM(config)
