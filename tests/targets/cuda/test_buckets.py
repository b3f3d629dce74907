"""Captured graphs and their times: all captures precede the first request."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5 import ON_CUDA
from tests.tiny import compiled, lowered, precision_of, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.graphs import buckets as buckets_module
from tilewright.compiler.targets.cuda.graphs import capture
from tilewright.compiler.targets.cuda.graphs.buckets import Buckets
from tilewright.compiler.targets.cuda.graphs.capture import (
    PromptBucket,
    prompt_buckets,
)
from tilewright.compiler.targets.cuda.graphs.mixed_graphs import BatchBucket, Passes, passes_for
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.outputs.sampling_batch import EVERY_DRAWING
from tilewright.compiler.targets.cuda.state.pages import PAGE
from tilewright.compiler.targets.cuda.state.ragged import num_rows_of
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.steps.routes import PART_TOKENS
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot
from tilewright.compiler.targets.program.instructions import AttentionOp
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState


class Counted:
    """Replaces a capture with a counter."""

    made = 0

    def __init__(self, run: Any, device: Any, pool: Any, group: Any = None) -> None:
        Counted.made += 1

    def __call__(self) -> None:
        pass


class Unrun:
    """Steps without computation, with two kinds of attention for long prompts."""

    device = torch.device("cpu")
    group = None
    attention = SimpleNamespace(
        reaches=(2, 8), begins_otherwise=lambda num_tokens: num_tokens > 512
    )

    def __init__(self) -> None:
        self.prompts: list[tuple[int, bool]] = []
        self.together: list[list[int]] = []

    def prefill(self, rows: Any, *, logit_rows: torch.Tensor, **how: Any) -> None:
        assert bool((rows.positions < 0).all()) and len(logit_rows) == 1
        if "layout" in how:
            starts = how["layout"].starts
            assert starts[-1] == len(rows.tokens)
            self.together.append(starts.tolist())
        else:
            self.prompts.append((len(rows.tokens), how["from_start"]))


@pytest.fixture(autouse=True)
def _counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "CapturedGraph", Counted)
    Counted.made = 0
    if torch.cuda.is_available():  # without the interpreter, Triton takes no CPU tensors
        monkeypatch.setattr(buckets_module, "forbid", lambda *tensors, width: None)


def buckets_of(
    steps: Any,
    rows: tuple[int, ...],
    *,
    tokens: tuple[int, ...] = (16,),
    passes: Passes = (),
    runs_together: bool = False,
    num_slots: int | None = None,
) -> Buckets:
    """Return buckets. ``num_slots`` is by default the maximum row count."""
    return Buckets(
        steps,
        rows=rows,
        tokens=tokens,
        num_choosable=lambda: 61,
        table=SlotTable(num_slots or rows[-1], 3, steps.device),
        passes=lambda: passes,
        runs_together=runs_together,
    )


def test_every_kind_of_step_is_captured_before_it_is_asked_for() -> None:
    steps: Any = Unrun()
    made = buckets_of(steps, (1, 2, 4), tokens=(16, 1024))
    made.prepare(3000, runs_long=True)
    assert steps.prompts == [(n, first) for n in (2048, 3000) for first in (False, True)]
    kinds = 1 + len(EVERY_DRAWING)
    # Masked rows, short and long contexts, and long prompts from position 0 or later.
    ready = 3 * (kinds + 2) + kinds + (kinds + 1)
    assert Counted.made == ready
    for count in (1, 2, 3, 4):
        for drawing in (None, *EVERY_DRAWING):
            for longest in (1, 2 * PAGE, 2 * PAGE + 1, 8 * PAGE):
                graph, reach = made.decode(count).bind(longest)
                assert reach >= longest
                graph()
                if drawing is not None:
                    made.decode(count).draw(drawing)
            made.decode(count).choose_again(drawing)
    for count in (1, 16, 17, 1024):
        for first in (0, 64):
            for drawing in (None, *EVERY_DRAWING):
                made.prompt(count).run(PrefillChunk(Slot(0), first, (0,) * count), drawing)
    assert Counted.made == ready


def test_chunks_are_aligned_and_mixed_batches_have_some_sizes() -> None:
    chunks = [PrefillChunk(Slot(0), 0, (1,) * count) for count in (1, 64, 65)]
    assert num_rows_of(chunks, 64) == 64 + 64 + 128 and num_rows_of(chunks, 1) == 130
    of_rows = 64, 128, 192, 256, 320, 384, 512, 640, 896, 1024
    assert passes_for((1, 2, 4), 8192) == ((4, of_rows),)
    among = dict(passes_for((1, 256), 8192))
    assert among[64] == (64, 128, 192, 256, 320, 448, 576, 832, 960)
    assert among[256] == (64, 128, 256, 384, 640, 768)
    assert [*among] == [16, 64, 128, 192, 256]
    sizes = (64, 256, 512, 1024, 2048)
    of_mixers = passes_for((1, 128), 8192, has_mixers=True)
    assert of_mixers == ((16, sizes), (64, sizes), (128, (*sizes, 4096, 8192)))
    assert passes_for((1, 128), 2048, has_mixers=True)[-1] == (128, sizes)
    ((_, most),) = passes_for((512,), 8192, has_mixers=True)[-1:]
    assert most[-1] + 512 <= PART_TOKENS, "rows that ride along read no expert again"
    assert passes_for((1, 8), 1024, has_mixers=True) == ((8, sizes[:-1]),), "no step has more"


def test_passes_of_prompts_and_rows_are_captured_before_they_are_asked_for() -> None:
    """For some sizes of both, with the largest rows. Larger mixed batches run without graphs."""
    steps: Any = Unrun()
    made = buckets_of(steps, (1, 2, 4, 8), passes=((4, (64, 256)), (8, (64, 512))))
    made.prepare(1, runs_long=True)
    ready = Counted.made
    assert ready == (4 + 1 + 2) * len(EVERY_DRAWING) + 3 * 4 + 1 + (3 + 3)
    asked = {(1, 0): (4, 64), (65, 4): (4, 256), (64, 5): (8, 64), (257, 1): (8, 512)}
    for (tokens, choices), expected in asked.items():
        found = made.batch(tokens, choices)
        assert found is not None and (found[0].width, found[1]) == expected
    assert made.batch(513, 1) is None and made.batch(64, 9) is None
    assert Counted.made == ready


def test_prepare_compiles_the_kernels_of_long_chunks_together() -> None:
    """Two prompts exceed the largest mixed batch, even if each of them fits."""
    passes = ((4, (64, 768)),)
    for longest, passes_of, runs_together, expected in (
        (3000, passes, True, [[0, 1408, 2816]]),
        (768, passes, True, [[0, 384, 768]]),
        (768, passes, False, []),
        (768, (), True, []),
        (200, passes, True, []),
    ):
        steps: Any = Unrun()
        how: Any = {"passes": passes_of, "runs_together": runs_together}
        buckets = buckets_of(steps, (1, 2, 4), tokens=(16, 1024), **how)
        buckets.prepare(longest, runs_long=True)
        assert steps.together == expected
        buckets.prepare(longest, runs_long=False)
        assert steps.together == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1024, [2048, (4, 1028), 1024, (2, 66), 16]), (4096, [(4, 4100), 2048, 1024, (2, 66), 16])],
)
def test_the_largest_is_captured_first(
    most: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest prompts and mixed batches. The rest run in their memory."""
    steps: Any = Unrun()
    passes = ((2, (64,)), (4, (64, most)))
    sizes = 16, 1024, 2048, 4096
    made = buckets_of(steps, (1,), tokens=sizes, passes=passes, num_slots=4)
    order: list[Any] = []
    monkeypatch.setattr(PromptBucket, "prepare", lambda self: order.append(self.num_tokens))
    monkeypatch.setattr(
        BatchBucket,
        "prepare",
        lambda self: order.append((self.width, self.width + self._sizes[-1])),
    )
    made.prepare(2048, runs_long=True)
    assert order == expected and not steps.prompts


def test_nothing_is_captured_once_a_loop_is_warm() -> None:
    """Several requests at a time, with more end tokens than the device supports."""
    model = tiny_model(num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    options: dict[str, Any] = {"compute": "fast", "max_batch": 5, "max_context": 64}
    executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
    loop = EngineLoop(executable)
    loop.warm_up()
    ready = executable.num_captures
    assert ready == Counted.made
    assert ready > 0
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.5, "stop_token_ids": tuple(range(1, 60))},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.5, "min_p": 0.1},
    ]
    for count in (1, 5):
        requests = [
            RequestState(at, (3,) * (1 + 7 * at), SamplingParams(max_tokens=4, seed=at, **kind))
            for at, kind in enumerate(kinds[:count])
        ]
        loop.generate(requests)
        assert all(each.finish_reason for each in requests)
    assert Counted.made == ready
    executable.close()


def test_prompts_are_captured_in_finer_sizes_where_their_tokens_cost() -> None:
    plans = [
        lower_to_program(lowered(model, target="cuda", precision=precision_of("bf16"))[0])
        for model in (tiny_model(num_layers=1), tiny_model(model_type="qwen3_5", **ON_CUDA))
    ]
    dense, mixers = map(prompt_buckets, plans)
    assert dense[-1] == mixers[-1] == 2048 and {*mixers} < {*dense}
    assert all(2 * less >= more for less, more in itertools.pairwise(dense))
    assert all(4 * less >= 3 * more for less, more in itertools.pairwise(dense) if less >= 384)


@pytest.mark.parametrize(
    ("num_layers", "shapes", "most"),
    [
        (32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 2048),  # Llama-3.1-8B
        (80, ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)), 512),  # 70B
        (64, ((10240, 5120), (5120, 8192), (51200, 5120), (5120, 25600)), 896),  # Qwen3-32B
    ],
)
def test_padding_costs_large_plans_more_than_launches(
    num_layers: int, shapes: tuple[tuple[int, int], ...], most: int
) -> None:
    attend = object.__new__(AttentionOp)
    products = [
        SimpleNamespace(weight=SimpleNamespace(shape=each), is_cross=False) for each in shapes
    ]
    plan: Any = SimpleNamespace(
        instructions=[attend] * num_layers, products=(*products * num_layers, products[0])
    )
    assert prompt_buckets(plan)[-1] == most
    assert prompt_buckets(plan, num_ranks=2)[-1] == 512, "whose parts may differ"
