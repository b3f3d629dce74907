"""What measurements may switch, to compare what runs with what may be faster: one variable of the
environment, ``TILEWRIGHT_CUDA_TRIALS=rows=64,blocks=parts,experts=parts``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from tilewright.errors import ConfigError, allowed

VARIABLE = "TILEWRIGHT_CUDA_TRIALS"
PARTS, WIDE, TOGETHER = "parts", "wide", "together"
LIBRARY, DENSE = "library", "dense"
APART, RIDING, SEVERAL = "apart", "riding", "several"
CUT, INSIDE = "cut", "inside"
MANY = "many"
BF16, SPREAD, WALKED = "bf16", "spread", "walked"
JOINED = "joined"
ALL = "all"
BEHIND, BESIDE = "behind", "beside"

_CHOICES: dict[str, tuple[str, ...]] = {
    "rows": ("64", "128", "256", "512"),
    "blocks": (PARTS, WIDE),
    "products": (LIBRARY, DENSE, MANY),
    "experts": (PARTS, TOGETHER),
    "few": (MANY, APART, INSIDE),
    "norms": (APART, INSIDE),
    "routers": (APART, JOINED),
    "attention": (WALKED, BF16, SPREAD),
    "reaches": (ALL, APART),
    "riders": (BEHIND, BESIDE),
    "prompts": ("1", "8", "64"),
    "hybrids": (APART, RIDING, SEVERAL),
    "totals": ("2048", "4096", "8192"),
    "ranks": (APART, RIDING),
    "snapshots": (CUT, INSIDE),
}


@dataclass(frozen=True, slots=True)
class Trials:
    """How steps run whose kernels were chosen by measurements: of few rows and of more than 64, of
    several prompts, and of both kinds of work.

    Attributes:
        rows: the most rows of a decode step; more come in further steps.
        blocks: of weights in block formats, ``wide``: up to 512 rows of steps and prompts by one
            kernel that decodes in registers, where it is faster than ``parts``: 64 rows at a time
            by the kernels of few rows, or by the library on dequantised weights where that is.
        products: of bfloat16 rows or e4m3 codes, ``dense``: up to 64 or 128 rows of steps and
            prompts by kernels of our own that begin early, where these are faster; ``library``: by
            kernels of few rows and the library's, which takes codes from 17 rows on, too;
            ``many``: as ``dense``, and SwiGLU of large weights with more than 64 rows by another of
            our own.
        prompts: pieces of prompts that one batch takes; more come one after another, and of 1 rows
            that decode share no pass with it. 0: as
            :func:`.device.most_pieces` finds best.
        hybrids: where a plan has experts or linear attention, rows that decode share a captured
            pass with one piece of a prompt (``riding``) or ``several``; ``apart``: with none.
        totals: tokens of the largest pass that ``several`` pieces share: of more than 2,048 it has
            eight pieces, not four.
        ranks: of several, ``riding``: pieces of prompts and rows that decode share captured passes
            as on one GPU; ``apart``: they share none.
        snapshots: of state inside of a piece of a prompt: ``inside``, its kernels keep it as they
            pass; ``cut``: the piece is cut there.
        experts: ``parts``: 64 tokens at a time by the kernels of few tokens; ``together``: as in
            prompts.
        few: experts of one or two rows, ``many``: by the kernels of 64 tokens; ``apart``: by those
            of few tokens, behind the router's; ``inside``: these find the experts of one row
            themselves.
        norms: that no product asks for, of a decode step's only row, ``inside``: made in the
            product right behind; ``apart``: as launches of their own.
        routers: of 5 to 32 rows of a decode step, ``joined``: their product and what chooses among
            its results are one launch; ``apart``: two.
        attention: of few rows over long tables, ``walked``: each block walks over pages; ``bf16``:
            rows over bfloat16 pages are spread over clusters of sixteen blocks; ``spread``: over
            bfp8 ones, too.
        reaches: decode steps of a dense plan whose rows have few pages, ``apart``: captured by
            themselves; ``all``: as those of long rows.
        riders: rows that decode beside pieces of prompts, in what reads and writes the state of
            sequences: ``behind`` these, or ``beside`` them on a stream of their own.
    """

    rows: int = 256
    blocks: str = WIDE
    products: str = MANY
    experts: str = TOGETHER
    few: str = INSIDE
    norms: str = INSIDE
    routers: str = JOINED
    attention: str = BF16
    reaches: str = APART
    riders: str = BESIDE
    prompts: int = 0
    hybrids: str = SEVERAL
    totals: int = 8192
    ranks: str = RIDING
    snapshots: str = INSIDE


def read_trials() -> Trials:
    """The trials that the environment asks for; what it does not name is as ever.

    Raises:
        ConfigError: for a name or a value that there is not.
    """
    found: dict[str, str] = {}
    for part in filter(None, os.environ.get(VARIABLE, "").split(",")):
        name, _, value = part.partition("=")
        if name not in _CHOICES:
            raise ConfigError(f"{VARIABLE}: {name!r}; {allowed(_CHOICES, name)}")
        if value not in _CHOICES[name]:
            raise ConfigError(f"{VARIABLE}: {name}={value!r}; {allowed(_CHOICES[name], value)}")
        found[name] = value
    default = Trials()
    return Trials(
        rows=int(found.get("rows", default.rows)),
        blocks=found.get("blocks", default.blocks),
        products=found.get("products", default.products),
        experts=found.get("experts", default.experts),
        few=found.get("few", default.few),
        norms=found.get("norms", default.norms),
        routers=found.get("routers", default.routers),
        attention=found.get("attention", default.attention),
        reaches=found.get("reaches", default.reaches),
        riders=found.get("riders", default.riders),
        prompts=int(found.get("prompts", default.prompts)),
        hybrids=found.get("hybrids", default.hybrids),
        totals=int(found.get("totals", default.totals)),
        ranks=found.get("ranks", default.ranks),
        snapshots=found.get("snapshots", default.snapshots),
    )
