"""What a plan is made of: instructions over the columns of a few buffers. No device, no weights.

A buffer is as wide as the values it holds one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.ir.info import Compute
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec

RESIDUAL, PRODUCT, OPERAND, LOGITS = "residual", "product", "operand", "logits"
"""What a buffer is to the kernels: a stream in fp32; what a product wrote; what the next product
reads (bfloat16, columns padded); logits, fp32."""


@dataclass(frozen=True, slots=True)
class Place:
    """Columns ``[first, first + width)`` of a buffer's rows, ``stride`` long each (0: width)."""

    buffer: int
    width: int
    first: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """Look up the row of a table for each token."""

    out: Place
    table: WeightRecipe


@dataclass(frozen=True, slots=True)
class Linear:
    """A product (``fused_linear``); with ``residual`` it is added to what ``out`` holds.

    ``compute``: the fidelity asked for, by phase.
    """

    fqn: str
    out: Place
    x: Place
    weight: WeightRecipe
    bias: WeightRecipe | None = None
    norm: WeightRecipe | None = None
    eps: float = 0.0
    residual: bool = False
    swiglu: bool = False
    group: str = ""
    compute: Compute | None = None


@dataclass(frozen=True, slots=True)
class Attend:
    """``rope_attention_step`` of a layer on q, k and v side by side. ``factor`` is of the channels
    that turn, where others do not; else it is in ``scale``.
    """

    out: Place
    qkv: Place
    state: StateSpec
    inv_freq: WeightRecipe
    num_heads: int
    scale: float
    window: int
    interleaved: bool
    soft_cap: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Gather:
    """The rows of the stream that want logits."""

    out: Place
    x: Place


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """``silu(gate) * up`` of two products."""

    out: Place
    gate: Place
    up: Place


@dataclass(frozen=True, slots=True)
class NormHeads:
    """The heads of q and k in ``qkv`` normed, in place or with v to ``out``."""

    out: Place
    qkv: Place
    q_norm: WeightRecipe
    k_norm: WeightRecipe
    num_heads: int
    eps: float


@dataclass(frozen=True, slots=True)
class Norm:
    """``rms_norm`` that no product computes itself."""

    out: Place
    x: Place
    weight: WeightRecipe
    eps: float


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The sum of all ranks' ``x``, which travels in the format ``wire``."""

    out: Place
    x: Place
    wire: str


@dataclass(frozen=True, slots=True)
class AllReduceAdd:
    """Such a sum added to what ``out`` holds, and with ``norm`` its RMSNorm to ``normed``."""

    out: Place
    x: Place
    wire: str
    normed: Place | None = None
    norm: WeightRecipe | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Elementwise:
    """``function`` of values and numbers: ``add``, ``mul``, ``div``, ``tanh`` or ``gelu``, whose
    ``approximate`` is the last.
    """

    out: Place
    function: str
    inputs: tuple[Place | float | str, ...]


@dataclass(frozen=True, slots=True)
class SigmoidGate:
    """Write ``x * sigmoid(gate)``; ``gate`` has a column for each of x, or one for all."""

    out: Place
    x: Place
    gate: Place


@dataclass(frozen=True, slots=True)
class Route:
    """The experts of every token, for the instructions up to the next `Route`: of them this rank
    has ``count`` from ``first`` on, which it counts from 0, or all (None); a token's others are
    other ranks'.
    """

    logits: Place
    top_k: int
    renormalise: bool
    first: int = 0
    count: int | None = None

    @property
    def num_experts(self) -> int:
        """How many of them this rank has."""
        return self.logits.width if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """Products with the experts of every token, side by side; ``x`` is one for all of them, or has
    theirs side by side as well. ``compute``: the fidelity asked for, by phase.
    """

    fqn: str
    out: Place
    x: Place
    weight: WeightRecipe
    swiglu: bool
    group: str
    compute: Compute | None = None


@dataclass(frozen=True, slots=True)
class ExpertSum:
    """The weighted sum of such products, of ``width`` columns each; with ``residual`` added to what
    ``out`` holds; with ``shared`` (and its gate of one column) plus shared * sigmoid(gate).
    ``compute``: the fidelity asked for, by phase.
    """

    fqn: str
    out: Place
    x: Place
    weight: WeightRecipe
    residual: bool
    shared: tuple[Place, Place] | None
    group: str
    compute: Compute | None = None


@dataclass(frozen=True, slots=True)
class Convolve:
    """A causal convolution over channels and its state (``causal_conv1d_step``)."""

    out: Place
    x: Place
    weight: WeightRecipe
    state: StateSpec


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The delta rule (``delta_rule_norm_step``), behind ``convolve`` where there is one: nothing
    else reads its ``qkv``, and where one kernel does both nothing is written there.
    """

    out: Place
    qkv: Place
    a: Place
    b: Place
    z: Place
    a_log: WeightRecipe
    dt_bias: WeightRecipe
    norm: WeightRecipe
    eps: float
    num_key_heads: int
    key_dim: int
    state: StateSpec
    convolve: Convolve | None = None


Mixer = SigmoidGate | Route | ExpertLinear | ExpertSum | Convolve | DeltaRule
"""What stands in models with experts or with linear attention."""

Collective = AllReduce | AllReduceAdd
"""What ranks exchange within a step."""

Plain = Embed | Linear | Gather | SwiGLU | NormHeads | Norm | Elementwise | Collective
Instruction = Plain | Attend | Mixer


@dataclass(frozen=True, slots=True)
class Buffer:
    """``role`` and the columns of its widest value."""

    role: str
    width: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, in order; the last instruction writes the logits: with ``dealt`` those of
    a rank's own columns, of as many as it says for each rank.
    """

    instructions: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...]
    dealt: tuple[int, ...] = ()

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The caches, in the order of the layers."""
        return tuple(each.state for each in self.instructions if isinstance(each, Attend))

    @property
    def sequence_states(self) -> tuple[StateSpec, ...]:
        """What is kept of a sequence whatever its length, in the order of the layers."""
        found: list[StateSpec] = []
        for each in self.instructions:
            if isinstance(each, DeltaRule) and each.convolve is not None:
                found.append(each.convolve.state)
            if isinstance(each, Convolve | DeltaRule):
                found.append(each.state)
        return tuple(found)

    @property
    def products(self) -> tuple[Linear, ...]:
        """The products that every token has, in order."""
        return tuple(each for each in self.instructions if isinstance(each, Linear))

    @property
    def hidden_size(self) -> int:
        """Columns of the rows that want logits; 0 if none are gathered."""
        return next((each.x.width for each in self.instructions if isinstance(each, Gather)), 0)

    @property
    def final_norm(self) -> tuple[WeightRecipe, float] | None:
        """The norm of gathered rows; None if they are normed before."""
        gathers = [n for n, each in enumerate(self.instructions) if isinstance(each, Gather)]
        following = self.instructions[gathers[0] + 1] if gathers else None
        if isinstance(following, Norm):
            return following.weight, following.eps
        if isinstance(following, Linear) and following.norm is not None:
            return following.norm, following.eps
        return None

    @property
    def vocab_size(self) -> int:
        """The columns of the logits, of all ranks together."""
        if self.dealt:
            return sum(self.dealt)
        last = self.instructions[-1]
        assert not isinstance(last, Route)
        return last.out.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a target's kernels ask of a plan.

    ``target`` and ``others``: its name, and what to run instead of what it has no kernel for.
    ``row_multiple``: a product's rows have room for whole tiles of so many of its weight's rows.
    ``has_soft_caps``: whether attention may cap its scores, or turn some channels with a factor.
    ``max_delta_dim``: channels of a key and of a value of the delta rule, at most.
    ``deals_experts``: whether a rank may have some of the experts.
    """

    target: str
    others: str
    row_multiple: int = 1
    has_soft_caps: bool = True
    max_delta_dim: int | None = None
    deals_experts: bool = True
