"""The instructions a plan is made of, and how they are bound to weights."""

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
