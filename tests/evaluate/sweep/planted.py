"""A model with planted losses and times. Cells return immediately without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from tests.models.conftest import tiny_hf_config
from tests.sweep_cells import done as done_event
from tests.sweep_cells import failed as failed_event
from tests.sweep_cells import planned, result, speed_result
from tilewright.compiler.precision import load_precision
from tilewright.evaluate.results.record import Accuracy, Result, pack_hits
from tilewright.evaluate.search.levels import Level
from tilewright.evaluate.search.plan import Bounds, SearchSpec, searched_place
from tilewright.evaluate.search.report import SearchResult
from tilewright.evaluate.search.search_runner import hunt
from tilewright.evaluate.sweep import plans
from tilewright.evaluate.sweep.journal import Added, SweepJournal, TrialFinished, TrialState
from tilewright.evaluate.sweep.model import SweptModel, swept_model
from tilewright.evaluate.sweep.plans import Measures
from tilewright.evaluate.sweep.runner import Runner
from tilewright.evaluate.sweep.summary import SweptRow
from tilewright.evaluate.sweep.trial import Trial
from tilewright.models import load_model

NUM_LAYERS = 3
NUM_POSITIONS = 128
ROUNDS = 3
LEVELS = ("q80", "bfp8", "bfp4")
BASE_KL = 1e-4
LOSS = {"ff1_3": 4.0, "ff2": 6.0, "wqkv": 1.0, "wo": 2.0, "lm_head": 5.0}
SCALE = {"bf16": 0.0, "q80": 1e-4, "bfp8": 2e-4, "bfp4": 8e-3}
MS_PER_BYTE = {"float32": 4e-6, "q80 blocks": 5e-6, "bfp8 blocks": 4e-6, "bfp4 blocks": 3e-6}
FIXED_MS = 0.2


def planted_model(folder: Path) -> SweptModel:
    """Return a model with three layers: twelve parts and the head."""
    folder.mkdir()
    config = tiny_hf_config(num_hidden_layers=NUM_LAYERS, max_position_embeddings=1536)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    values = {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {name: torch.zeros(each.shape) for name, each in module.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = ["<|start|>", "<|im_end|>", *map(chr, range(97, 123))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return swept_model(load_model(folder), str(folder))


@dataclass
class Planted:
    """Answers cells from losses per part and times per byte.

    ``measured``: new cell ids. ``held_out``: KL factor on the held-out text. ``fails``: ids with an
    error.
    """

    journal: SweepJournal
    model: SweptModel
    held_out: float = 1.0
    fails: Callable[[Trial], bool] = lambda cell: False
    measured: list[Trial] = field(default_factory=list)

    def measure(self, cells: Sequence[Trial]) -> list[TrialState]:
        known = self.journal.state.cells
        new = [cell for cell in cells if cell.id not in known]
        new += [state.cell for state in self.journal.state.open_cells()]
        self.journal.append(
            *(event for cell in new for event in (Added(cell), self._finished(cell)))
        )
        self.measured += new
        return [self.journal.state.cells[cell.id] for cell in cells]

    def _finished(self, cell: Trial) -> TrialFinished:
        return failed_event(cell) if self.fails(cell) else done_event(cell, self.result(cell))

    def result(self, cell: Trial) -> Result:
        if cell.kind == "speed":
            # A machine's noise is common to all configurations in a round.
            drift = 1 + 0.1 * math.sin(cell.round)
            return speed_result(cell, [1e3 / (planted_ms(cell) * drift)])
        kl = planted_kl(self.model, cell.heading)
        kl *= self.held_out if cell.text == "held-out" else 1.0
        return result(cell, accuracy=planted_accuracy(kl, cell.text))


def planted_ms(cell: Trial) -> float:
    """Return the time of a decode step."""
    return FIXED_MS + sum(MS_PER_BYTE[kind] * size for kind, size in cell.step_bytes.items())


def planted_kl(model: SweptModel, heading: str) -> float:
    """Return the KL of a configuration: the base, and the losses of its parts.

    Early layers lose more.
    """
    resolved = model.resolve(load_precision(heading))
    total = BASE_KL
    for group in LOSS:
        for layer in model.layers(group) or [None]:
            weights = [w for w in model.weights if (w.group, w.layer) == (group, layer)]
            form = resolved.format(group, layer=layer, fqn=weights[0].fqn)
            share = 1.0 if layer is None else 0.5**layer
            total += LOSS[group] * share * SCALE[str(getattr(form, "name", form))]
    return total


def planted_accuracy(kl: float, text: str | None = None) -> Accuracy:
    """Return the wrong positions: KL exceeds the tolerance of a position."""
    num_wrong = min(NUM_POSITIONS, round(NUM_POSITIONS * (1 - math.exp(-kl))))
    found = [(7 * index) % NUM_POSITIONS >= num_wrong for index in range(NUM_POSITIONS)]
    return Accuracy.from_counts(
        "reference",
        num_positions=NUM_POSITIONS,
        num_top1=sum(found),
        num_top5=NUM_POSITIONS,
        kl_mean=kl,
        kl_error=kl / 50,
        hits=pack_hits(found),
        text=text or "accuracy",
    )


def asked(model: SweptModel, *, levels: Sequence[str] = LEVELS, **bounds: float) -> SearchSpec:
    """Return a search on the cpu from bf16."""
    device, base = searched_place(model, "cpu", (), "bf16")
    return SearchSpec(
        model=model,
        target="cpu",
        device=device,
        base=base,
        bounds=Bounds(**(bounds or {"max_kl": 0.05})),  # type: ignore[arg-type]
        levels=tuple(map(Level.parse, levels)),
        usual=Measures(rounds=ROUNDS),
        held_out="held-out",
    )


def begin(path: Path, of: SearchSpec, known: SweepJournal | None) -> SweepJournal:
    first = of.first_cells(known)
    return SweepJournal.create(path, planned("search", base=first[0].precision_id), first)


def run(runner: Planted, of: SearchSpec, known: SweepJournal | None = None) -> SearchResult:
    return hunt(of, cast(Runner, runner), known)


def search(tmp_path: Path, of: SearchSpec, **changes: object) -> tuple[SearchResult, Planted]:
    """Run a search with its sensitivity measurements."""
    journal = begin(tmp_path / "search.jsonl", of, None)
    runner = Planted(journal, of.model, **changes)  # type: ignore[arg-type]
    return run(runner, of), runner


def winner(found: SearchResult) -> SweptRow:
    """Return the last printed row."""
    assert found.yaml is not None
    return found.shown[-1][0]


def is_uniform(row: SweptRow) -> bool:
    return row.cell.precision.startswith(("bf16", "all="))


def read_back(path: Path, text: str, model: SweptModel) -> str:
    """Return the configuration id from a winner's file."""
    path.write_text(text)
    return model.resolve(load_precision(str(path))).id


def sizes(model: SweptModel) -> dict[str, int]:
    """Return the bytes for the base and for every uniform level."""
    cells = asked(model, max_kl=1.0).first_cells(None)
    return {cell.precision: cell.weight_bytes or 0 for cell in cells}


def known_sensitivities(path: Path, model: SweptModel, level: str = "bfp8") -> SweepJournal:
    """Return a finished sensitivity sweep."""
    base = load_precision("bf16")
    probes = plans.sensitivity_entries(model, "cpu", "CPU", base=base, level=Level.parse(level))
    cells = plans.cells(probes, plans.Measures(rounds=ROUNDS))
    journal = SweepJournal.create(path, planned("sensitivity", base=cells[0].precision_id), cells)
    Planted(journal, model).measure(cells)
    return journal
