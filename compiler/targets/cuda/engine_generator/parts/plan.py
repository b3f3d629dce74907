"""The instructions of a plan, and the choices of kernels."""

from __future__ import annotations

from dataclasses import dataclass


class Instruction:
    """A step of a plan. ``name``: of the method that runs it. ``residual``: it reads ``out``."""

    name, residual = "", False


@dataclass(frozen=True)
class Embed(Instruction):
    """``out`` begins as the row of ``table`` for each token."""

    name = "embed"
    out: str
    table: str


@dataclass(frozen=True)
class Linear(Instruction):
    """A product with the rows of ``weights``, stacked.

    ``norm``: the weight of an RMSNorm that ``x`` passes through first. ``residual``: the product is
    added to ``out``. ``swiglu``: the weights are gate and up, the result is silu(gate) * up.
    """

    name = "linear"
    out: str
    x: str
    weights: tuple[str, ...]
    norm: str = ""
    residual: bool = False
    swiglu: bool = False


@dataclass(frozen=True)
class Norm(Instruction):
    """An RMSNorm that no product computes itself."""

    name = "norm"
    out: str
    x: str
    weight: str


@dataclass(frozen=True)
class Attend(Instruction):
    """Rotate q and k, remember k and v, attend causally to all that is remembered."""

    name = "attend"
    out: str
    qkv: str


@dataclass(frozen=True)
class Gather(Instruction):
    """Keep each request's last row: only its logits are asked for."""

    name = "gather"
    out: str
    x: str


@dataclass(frozen=True)
class Plan:
    """What a step computes: ``first`` once, ``layer`` for every layer, ``last`` once.

    Values go by name. Weights are named as in a Hugging Face checkpoint, those of ``layer`` without
    their ``layers.{i}.``.
    """

    first: tuple[Instruction, ...]
    layer: tuple[Instruction, ...]
    last: tuple[Instruction, ...]


@dataclass(frozen=True)
class Choices:
    """What the generator measured and chose. Every choice computes the same.

    Attributes:
        products: of few rows, in kernels of "triton" or of "cuda" C++; with either, each product of
            a decode step is timed beside the library's when an engine is made.
        chained: kernels are placed before those ahead of them have ended (Hopper and later).
        outputs, one_outputs: of a program of a product of few rows, and of one with a single row.
        columns, parts, warps: that it takes at once, in how many parts, with how many warps.
        whole: columns of x up to which it takes all at once.
        keys: cached positions that decode attention takes at once, also of several pages.
        queries: tokens of a prompt that a program attends for, fewer where there are few.
        prompts: sizes in tokens of the graphs for prompts; longer ones are launched one by one.
        batches: numbers of requests of the graphs for decode; more are decoded in several steps.
    """

    products: str = "triton"
    chained: bool = True
    outputs: int = 16
    one_outputs: int = 8
    columns: int = 512
    whole: int = 1024
    parts: int = 4
    warps: int = 4
    keys: int = 64
    queries: int = 64
    prompts: tuple[int, ...] = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class NativeChoices(Choices):
    """Choices with kernels in CUDA C++ beside products'. They take bfloat16 on Hopper, Triton's
    all else.

    Attributes:
        native: of decode steps, "attention", "delta" (linear attention), "experts" of up to 64
            rows.
    """

    native: tuple[str, ...] = ()


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
