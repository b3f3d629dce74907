"""A plan's instructions, and the choice of kernels."""

from __future__ import annotations

from dataclasses import dataclass


class Instruction:
    """A plan's step. ``name``: the method that runs it. ``residual``: it reads ``out``."""

    name, residual = "", False


@dataclass(frozen=True)
class Embed(Instruction):
    """Set ``out`` to the row of ``table`` for each token."""

    name = "embed"
    out: str
    table: str


@dataclass(frozen=True)
class Linear(Instruction):
    """A matmul with the stacked rows of ``weights``.

    ``norm``: weight for an RMSNorm before the matmul. ``residual``: the result is added to ``out``.
    ``swiglu``: the weights are gate and up, and the result is silu(gate) * up.
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
    """An RMSNorm outside a matmul."""

    name = "norm"
    out: str
    x: str
    weight: str


@dataclass(frozen=True)
class Attend(Instruction):
    """Rotate q and k, store k and v, and attend causally to all stored positions."""

    name = "attend"
    out: str
    qkv: str


@dataclass(frozen=True)
class Gather(Instruction):
    """Select each request's last row for its logits."""

    name = "gather"
    out: str
    x: str


@dataclass(frozen=True)
class Plan:
    """A step: ``first`` once, ``layer`` for every layer, ``last`` once.

    Values have names. Weights have Hugging Face names. In ``layer``, the names lack the prefix
    ``layers.{i}.``.
    """

    first: tuple[Instruction, ...]
    layer: tuple[Instruction, ...]
    last: tuple[Instruction, ...]


@dataclass(frozen=True)
class Choices:
    """The generator's measured choices. All choices compute the same.

    Attributes:
        products: kernels for small matmuls, "triton" or "cuda" (C++). A new engine also times each
            matmul in a decode step with the library.
        chained: kernels launch before earlier kernels have finished (Hopper and later).
        outputs, one_outputs: outputs per program, for several rows and for a single row.
        columns, parts, warps: columns per iteration, their parts, and the warps.
        whole: maximum columns of x without a loop.
        keys: cached positions per iteration of decode attention, also over several pages.
        queries: prompt tokens per attention program, fewer for small prompts.
        prompts: token sizes of prefill graphs. Longer prompts are launched one by one.
        batches: request counts of decode graphs. More requests take several steps.
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
    """Choices with further CUDA C++ kernels, for bfloat16 on Hopper. Triton runs the rest.

    Attributes:
        native: kernels for decode steps: "attention", "delta" (linear attention), "experts" (up to
            64 rows).
    """

    native: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mixer(Instruction):
    """An instruction with weights in its own fields, named in ``weight_fields``.

    ``x`` is a matmul's output.
    """

    out: str
    x: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class GatedAttend(Mixer):
    """`Attend` on ``x``: q, k, v, and a gate per channel of q.

    The heads of q and k have an RMSNorm. The output is multiplied by the gates' sigmoid.
    """

    name = "gated_attend"
    q_norm: str
    k_norm: str

    @property
    def weight_fields(self) -> tuple[str, ...]:
        return ("q_norm", "k_norm")


@dataclass(frozen=True)
class DeltaRule(Mixer):
    """Gated DeltaNet (Yang et al., 2024) on ``x``: q, k, v, z, and a and b per head.

    q, k and v have a causal convolution and SiLU. A head's memory ``S [K, V]`` becomes
    ``S' = e^g S + k r^T`` with ``r = sigmoid(b) (v - (e^g S)^T k)`` and
    ``g = -e^a_log softplus(a + dt_bias)``. k and q have length 1, and q is divided by the root of
    K. The output is ``norm(S'^T q) * silu(z)``.
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
    """Add the weighted outputs of a row's experts for ``x``, and the shared expert's output.

    ``shared`` is multiplied by its gate's sigmoid. ``logits`` has a value per expert for the
    softmax, then the gate. ``gates_ups`` has the gates and ups of an expert, ``downs`` its last
    matmul.
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
    """A plan with ``layer`` for attention, and ``linear_layer`` for linear attention."""

    linear_layer: tuple[Instruction, ...]
