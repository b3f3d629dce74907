"""Published Wormhole rows as samples for the time model, by their use in the fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bench.boards_fit.fitting import Sample
from bench.boards_fit.programs import Programs
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.precision import PHASES, Phase, PrecisionConfig, load_precision
from tilewright.compiler.targets.tenstorrent.target import MESHES
from tilewright.evaluate.report.perf_md import Document, PerfRow, Section
from tilewright.models.shapes import SHAPES

PROMPT, GENERATED = 128, 200
"""Tokens in a published short row. A decode step has half the generated tokens on average."""

PUBLISHED: Mapping[str, str] = MappingProxyType(
    {
        "Llama3.2-1B": "llama-3.2-1b",
        "Llama3.2-3B": "llama-3.2-3b",
        "Llama3.1-8B": "llama-3.1-8b",
        # A text prompt skips the cross-attention layers of 11B and 90B.
        "Llama3.2-11B": "llama-3.1-8b",
        "Llama3.1-70B": "llama-3.1-70b",
        "Llama3.2-90B": "llama-3.1-70b",
        "Qwen2.5-7B": "qwen2.5-7b",
        "Qwen2.5-72B": "qwen2.5-72b",
        "Phi3.5-mini": "phi-3.5-mini",
        "Phi-3-mini-128k-instruct": "phi-3.5-mini",
    }
)
"""Shapes by published model. Equal sizes share a shape."""

VISION = "Llama3.2-90B"
"""Not judged: its speeds have one digit, and its prompts took 30 times the expected time."""

_DEVICES = {"N150": "n150", "150": "n150", "N300": "n300", "T3K": "t3k", "TG": "tg"}
_ATTENTION_OPS = ("li_qkv", "li_o", "sdpa")
_BFP4_IN_ACCURACY = ("Llama3.1-70B", "Qwen2.5-72B")


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A published row with the samples of its decode step and its prompt."""

    kind: str
    title: str
    row: PerfRow
    decode: Sample | None
    prefill: Sample | None

    @property
    def device(self) -> str:
        """The board name, with its replicas."""
        return device_name(self.row)

    @property
    def num_replicas(self) -> int:
        """The number of replicas that share the board."""
        return self.row.dp

    @property
    def is_judged(self) -> bool:
        """Whether the model is judged by this row: a whole board with up to eight chips."""
        return self.is_whole and self.row.device != "TG" and self.row.model != VISION

    @property
    def is_galaxy(self) -> bool:
        """Whether this row has 32 chips. They are in the fit of decode steps."""
        return self.is_whole and self.row.device == "TG"

    @property
    def is_whole(self) -> bool:
        """Whether a user has a whole board, a short prompt and a named configuration."""
        return self.kind in ("performance", "accuracy") and self.row.dp == 1


def device_name(published: PerfRow) -> str:
    """Return the board name, with its replicas."""
    name = "N150" if published.device == "150" else published.device
    return name if published.dp == 1 else f"{name} (DP={published.dp})"


def read_rows(document: Document, programs: Programs) -> list[PublishedRow]:
    """Return all rows with figures and known sizes."""
    return [
        _case(section, published, programs)
        for section in document.sections
        for published in section.rows
        if published.model in PUBLISHED
        and (published.speed is not None or published.ttft is not None)
    ]


def _case(section: Section, published: PerfRow, programs: Programs) -> PublishedRow:
    length = PROMPT if section.context_k is None else 1024 * section.context_k
    if section.kind == "precision":
        precision = load_precision(section.title)
    else:
        precision = published_precision(section.kind, published.model)

    def sample(phase: Phase, seconds: float | None) -> Sample | None:
        if seconds is None:
            return None
        is_decode, mesh = phase == "decode", MESHES[_DEVICES[published.device]]
        work = programs.work(
            SHAPES[PUBLISHED[published.model]],
            precision,
            model=published.model,
            board=_DEVICES[published.device],
            mesh=Mesh(mesh.num_chips // published.dp) if published.dp > 1 else mesh,
            phase=phase,
            batch=32 if is_decode and section.kind == "batch_32" else 1,
            length=1 if is_decode else length,
            context=length + GENERATED // 2 if is_decode else length,
        )
        return Sample(
            published.model, device_name(published), section.kind, seconds, work, is_decode
        )

    step = None if published.speed is None else 1 / published.speed
    prompt = None if published.ttft is None else published.ttft / 1e3
    return PublishedRow(
        section.kind, section.title, published, sample("decode", step), sample("prefill", prompt)
    )


def published_precision(section: str, model: str) -> PrecisionConfig:
    """Return a row's configuration, except in the precision section.

    The published introductions give the formats: gate and up in bfp4, in the section "accuracy"
    for two models only. The configuration with the section's name gives the fidelities.
    """
    named = load_precision("accuracy" if section == "accuracy" else "performance")
    of_model = named.resolve(1, model)
    is_bfp4 = section != "accuracy" or model in _BFP4_IN_ACCURACY
    fidelities = {
        f"{op}_{phase}": of_model.fidelity(op, phase)
        for op in ("li_ff2", *_ATTENTION_OPS)
        for phase in PHASES
    }
    fidelities["li_ff1_3"] = "lofi" if is_bfp4 else "hifi2"
    settings = ", ".join(f"{key}: {value}" for key, value in fidelities.items())
    ff1_3 = "bfp4" if is_bfp4 else "bfp8"
    return load_precision(f"precision_cfg = {{ff1_3: {ff1_3}}}, fidelity_cfg = {{{settings}}}")
