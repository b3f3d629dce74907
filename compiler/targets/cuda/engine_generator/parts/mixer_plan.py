"""Instructions of layers with experts, gates or linear attention, and plans with both kinds."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Instruction, Plan


@dataclass(frozen=True)
class Mixer(Instruction):
    """An instruction that reads weights by names of its own: the fields in ``weight_fields``.

    ``x`` is a value as a product leaves it.
    """

    out: str
    x: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class GatedAttend(Mixer):
    """`Attend` on ``x``: q, k, v, and a gate for each channel of q. The heads of q and k pass
    through an RMSNorm first; what comes out is multiplied by the sigmoid of the gates.
    """

    name = "gated_attend"
    q_norm: str
    k_norm: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ("q_norm", "k_norm")


@dataclass(frozen=True)
class DeltaRule(Mixer):
    """Gated DeltaNet (Yang et al., 2024) on ``x``: q, k and v, which a causal convolution and SiLU
    pass first, z, and a and b, a value of each for every head.

    A head's memory ``S [K, V]`` becomes ``S' = e^g S + k r^T`` with ``r = sigmoid(b) (v - (e^g S)^T
    k)`` and ``g = -e^a_log softplus(a + dt_bias)``; k and q have length 1, q is over the root of K.
    Out comes ``norm(S'^T q) * silu(z)``.
    """

    name = "delta_rule"
    convolution: str
    a_log: str
    dt_bias: str
    norm: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ("convolution", "a_log", "dt_bias", "norm")


@dataclass(frozen=True)
class Experts(Mixer):
    """Add what a row's own experts make of ``x``, by their shares, and what one that all rows have
    made, ``shared``, times the sigmoid of its gate.

    ``logits``: one for each expert, whose softmax is a row's shares, and last the gate. Gates and
    ups of an expert lie in ``gates_ups``, its last product in ``downs``.
    """

    name, residual = "experts", True
    logits: str
    shared: str
    gates_ups: str
    downs: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ("gates_ups", "downs")


@dataclass(frozen=True)
class HybridPlan(Plan):
    """A plan whose ``layer`` is of attention, and ``linear_layer`` of linear attention."""

    linear_layer: tuple[Instruction, ...]
