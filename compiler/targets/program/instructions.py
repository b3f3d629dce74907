"""Instructions of a kernel program over a few buffers' columns, without devices and weights.

A buffer has its widest value's width.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.compiler.ir.info import Compute
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec

RESIDUAL, PRODUCT, OPERAND, LOGITS = "residual", "product", "operand", "logits"
"""Roles of buffers: an fp32 stream; a matmul's output; a matmul's input (bfloat16, padded columns);
fp32 logits.
"""


@dataclass(frozen=True, slots=True)
class BufferView:
    """Columns ``[first, first + width)`` of a buffer. ``stride`` is the row length, 0 means
    ``width``.
    """

    buffer: int
    width: int
    first: int = 0
    stride: int = 0

    @property
    def pitch(self) -> int:
        """Return the distance between rows in columns."""
        return self.stride or self.width


@dataclass(frozen=True, slots=True)
class EmbedOp:
    """Look up an embedding per token."""

    out: BufferView
    table: WeightRecipe


@dataclass(frozen=True, slots=True)
class ReadHiddenOp:
    """Read a draft layer's input: a hidden state per token."""

    out: BufferView


@dataclass(frozen=True, slots=True)
class LinearOp:
    """A matmul (``fused_linear``). With ``residual``, add the result to ``out``.

    ``compute`` is the requested fidelity by phase.
    """

    fqn: str
    out: BufferView
    x: BufferView
    weight: WeightRecipe
    bias: WeightRecipe | None = None
    norm: WeightRecipe | None = None
    eps: float = 0.0
    residual: bool = False
    swiglu: bool = False
    group: str = ""
    compute: Compute | None = None

    @property
    def is_cross(self) -> bool:
        """Return whether the matmul belongs to a cross-attention layer."""
        return ".cross_layers." in self.fqn


@dataclass(frozen=True, slots=True)
class AttentionOp:
    """``rope_attention_step`` on adjacent q, k and v columns.

    ``factor`` scales the rotated channels if only some channels rotate. Otherwise ``scale``
    includes it. ``sinks`` has a further score per query head.
    """

    out: BufferView
    qkv: BufferView
    state: StateSpec
    inv_freq: WeightRecipe
    num_heads: int
    scale: float
    window: int
    interleaved: bool
    soft_cap: float = 0.0
    factor: float = 1.0
    sinks: WeightRecipe | None = None


@dataclass(frozen=True, slots=True)
class GatherOp:
    """Select the stream's rows for logits."""

    out: BufferView
    x: BufferView


@dataclass(frozen=True, slots=True)
class SwiGLUOp:
    """``silu(gate) * up`` from two matmuls."""

    out: BufferView
    gate: BufferView
    up: BufferView


@dataclass(frozen=True, slots=True)
class NormHeads:
    """Normalize the q and k heads in ``qkv``, in place or to ``out`` together with v."""

    out: BufferView
    qkv: BufferView
    q_norm: WeightRecipe
    k_norm: WeightRecipe
    num_heads: int
    eps: float


@dataclass(frozen=True, slots=True)
class NormOp:
    """An ``rms_norm`` outside matmuls."""

    out: BufferView
    x: BufferView
    weight: WeightRecipe
    eps: float


@dataclass(frozen=True, slots=True)
class CrossAttentionOp:
    """``cross_attention`` with normalized query heads. Keys begin at column ``first`` of the image
    rows, and values follow.
    """

    out: BufferView
    q: BufferView
    norm: WeightRecipe
    eps: float
    num_heads: int
    num_kv_heads: int
    first: int
    scale: float


@dataclass(frozen=True, slots=True)
class AddGatedOp:
    """Add ``tanh(gate) * x`` to ``out`` in rows with visible images."""

    out: BufferView
    x: BufferView
    gate: WeightRecipe


@dataclass(frozen=True, slots=True)
class AllReduceOp:
    """The sum of all ranks' ``x``. ``wire`` is the link format."""

    out: BufferView
    x: BufferView
    wire: str


@dataclass(frozen=True, slots=True)
class AllReduceAdd:
    """An all-reduce added to ``out``. With ``norm``, also write its RMSNorm to ``normed``."""

    out: BufferView
    x: BufferView
    wire: str
    normed: BufferView | None = None
    norm: WeightRecipe | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class Elementwise:
    """``function`` on values and numbers: ``add``, ``mul``, ``div``, ``tanh`` or ``gelu``.

    The last input of ``gelu`` is its ``approximate`` mode.
    """

    out: BufferView
    function: str
    inputs: tuple[BufferView | float | str, ...]


@dataclass(frozen=True, slots=True)
class SigmoidGate:
    """``x * sigmoid(gate)``. ``gate`` has a column per column of x, or a single column."""

    out: BufferView
    x: BufferView
    gate: BufferView


@dataclass(frozen=True, slots=True)
class TopKRouteOp:
    """Expert selection per token, valid up to the next `TopKRouteOp`.

    This rank has ``count`` experts starting at ``first``. It numbers them from 0. None: all
    experts. Experts on other ranks are ignored. With ``bias`` per expert, weights are sigmoids,
    times ``scale``.
    """

    logits: BufferView
    top_k: int
    renormalise: bool
    first: int = 0
    count: int | None = None
    bias: WeightRecipe | None = None
    scale: float = 1.0

    @property
    def num_experts(self) -> int:
        """Return the expert count on this rank."""
        return self.logits.width if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class ExpertLinearOp:
    """Matmuls with each token's experts, in adjacent columns.

    ``x`` is common to all experts, or has adjacent columns per expert. ``compute`` is the requested
    fidelity by phase. ``limit`` above 0 selects the clamped SwiGLU with ``alpha``.
    """

    fqn: str
    out: BufferView
    x: BufferView
    weight: WeightRecipe
    swiglu: bool
    group: str
    compute: Compute | None = None
    bias: WeightRecipe | None = None
    limit: float = 0.0
    alpha: float = 1.0


@dataclass(frozen=True, slots=True)
class ExpertSum:
    """The weighted sum of matmuls with each token's experts.

    With ``residual``, add it to ``out``. With ``shared`` (value and single-column gate), also add
    ``shared * sigmoid(gate)``. ``compute`` is the requested fidelity by phase.
    """

    fqn: str
    out: BufferView
    x: BufferView
    weight: WeightRecipe
    residual: bool
    shared: tuple[BufferView, BufferView] | None
    group: str
    compute: Compute | None = None
    bias: WeightRecipe | None = None


@dataclass(frozen=True, slots=True)
class Convolve:
    """A causal convolution over channels with its state (``causal_conv1d_step``).

    ``silu`` applies SiLU to the result.
    """

    out: BufferView
    x: BufferView
    weight: WeightRecipe
    state: StateSpec
    silu: bool = True


@dataclass(frozen=True, slots=True)
class DeltaRuleOp:
    """The delta rule with its norm (``delta_rule_norm_step``), after an optional ``convolve``.

    A fused kernel for both does not write ``qkv``. No other instruction reads it.
    """

    out: BufferView
    qkv: BufferView
    a: BufferView
    b: BufferView
    z: BufferView
    a_log: WeightRecipe
    dt_bias: WeightRecipe
    norm: WeightRecipe
    eps: float
    num_key_heads: int
    key_dim: int
    state: StateSpec
    convolve: Convolve | None = None


Mixer = SigmoidGate | TopKRouteOp | ExpertLinearOp | ExpertSum | Convolve | DeltaRuleOp
"""Instructions for experts or linear attention."""

Collective = AllReduceOp | AllReduceAdd
"""Collectives within a step."""

Cross = CrossAttentionOp | AddGatedOp
"""Instructions of cross-attention layers."""

Input = EmbedOp | ReadHiddenOp

Plain = (
    Input | LinearOp | GatherOp | SwiGLUOp | NormHeads | NormOp | Elementwise | Collective | Cross
)
Instruction = Plain | AttentionOp | Mixer


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer's role and its widest value's columns."""

    role: str
    width: int


@dataclass(frozen=True, slots=True)
class KernelProgram:
    """A kernel program: instructions in order. The last instruction writes the logits.

    ``logit_columns`` is the logit column count per rank. Empty: each rank has all columns.
    ``draft_layer`` is the draft layer's program. None: no draft layer.
    """

    instructions: tuple[Instruction, ...]
    buffers: tuple[Buffer, ...]
    logit_columns: tuple[int, ...] = ()
    draft_layer: KernelProgram | None = None

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """Return the KV caches in layer order, then the draft layer's."""
        own = tuple(op.state for op in self.instructions if isinstance(op, AttentionOp))
        return own + (() if self.draft_layer is None else self.draft_layer.states)

    @property
    def sequence_states(self) -> tuple[StateSpec, ...]:
        """Return the per-sequence states in layer order."""
        found: list[StateSpec] = []
        for each in self.instructions:
            if isinstance(each, DeltaRuleOp) and each.convolve is not None:
                found.append(each.convolve.state)
            if isinstance(each, Convolve | DeltaRuleOp):
                found.append(each.state)
        return tuple(found)

    @property
    def products(self) -> tuple[LinearOp, ...]:
        """Return the linears in order, without expert linears."""
        return tuple(each for each in self.instructions if isinstance(each, LinearOp))

    @property
    def hidden_size(self) -> int:
        """Return the columns of gathered rows. 0: no rows are gathered."""
        return next((each.x.width for each in self.instructions if isinstance(each, GatherOp)), 0)

    @property
    def final_norm(self) -> tuple[WeightRecipe, float] | None:
        """Return the norm after the gather. None: rows are normalized before it."""
        gathers = [n for n, each in enumerate(self.instructions) if isinstance(each, GatherOp)]
        following = self.instructions[gathers[0] + 1] if gathers else None
        if isinstance(following, NormOp):
            return following.weight, following.eps
        if isinstance(following, LinearOp) and following.norm is not None:
            return following.norm, following.eps
        return None

    @property
    def vocab_size(self) -> int:
        """Return the logit columns over all ranks."""
        if self.logit_columns:
            return sum(self.logit_columns)
        last = self.instructions[-1]
        assert not isinstance(last, TopKRouteOp)
        return last.out.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A target's requirements for kernel programs.

    Attributes:
        target: Target name.
        others: Targets to suggest for unsupported operations.
        row_multiple: Pad matmul outputs to a multiple of this column count.
        has_soft_caps: Attention supports score caps, and scaled rotation of some channels.
        max_delta_dim: Maximum key and value channels in the delta rule. None: no limit.
        deals_experts: A rank may have some of the experts.
        has_cross_layers: There are kernels for cross-attention to images.
    """

    target: str
    others: str
    row_multiple: int = 1
    has_soft_caps: bool = True
    max_delta_dim: int | None = None
    deals_experts: bool = True
    has_cross_layers: bool = False
