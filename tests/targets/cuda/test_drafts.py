"""Decode steps with drafts on the CUDA target: the output equals a run without drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tests.grids import only
from tests.models.test_qwen3_5 import ON_CUDA
from tests.targets.cuda.recorded import CUDA, plan_of, recorded_gpu, rows_of, steps_of
from tests.targets.cuda.strict_drafts import SAMPLINGS, no_drafts, oracle, run
from tests.targets.cuda.test_invariance import run as run_process
from tests.tiny import compiled, precision_of, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda import memory_budget
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.state.token_batch import SlotRows
from tilewright.compiler.targets.interface.base import Executable
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES
from tilewright.options.engine_config import EngineConfig
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import SpeculativeConfig

ROWS_KERNEL = "delta_rows:delta_rows_128_32"
GREEDY, SAMPLED, FILTERED, BIASED = SAMPLINGS
SIZE: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    """An executable with strict kernels, which the interpreter runs on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_budget, "invariant_of", lambda *_: "rows")
        made = compiled(
            tiny_model(std=0.3, **SIZE),
            "cuda",
            precision=precision_of("bf16"),
            compute="fast",
            max_context=128,
            is_strict=True,
            max_drafts=3,
        )
    yield made
    made.close()


@pytest.mark.parametrize(
    ("params", "rate", "how"),
    only(
        [(FILTERED, 0.5, {"is_ahead": True})],
        [
            (params, rate, how)
            for params in SAMPLINGS
            for rate in (0.0, 0.5, 1.0)
            for how in ({"is_ahead": True}, {"logprobs": 0, "swaps": 0})
        ],
    ),
)
def test_drafts_leave_the_output_unchanged(
    executable: Executable, params: Any, rate: float, how: dict[str, Any]
) -> None:
    """Over page borders, with different numbers of drafts."""
    lengths, num_tokens = (62, 3), 5
    plain, _ = run(
        executable, lengths, params, no_drafts, num_tokens=num_tokens, logprobs=how.get("logprobs")
    )
    drafter = oracle(plain, (3, 0), rate)
    found, num_steps = run(executable, lengths, params, drafter, num_tokens=num_tokens, **how)
    assert found == plain
    assert rate < 1.0 or num_steps < num_tokens or "is_ahead" not in how


@pytest.mark.parametrize(
    ("params", "swaps"), only([(SAMPLED, 0), (BIASED, None)], product(SAMPLINGS, (None, 0)))
)
def test_rejected_drafts_leave_sequence_state_unchanged(params: Any, swaps: int | None) -> None:
    """Slots with right and with wrong drafts, on a model with linear attention."""
    model = tiny_model(std=0.3, model_type="qwen3_5", **ON_CUDA)
    made = compiled(model, "cuda", precision=precision_of("bf16"), max_drafts=3)
    assert made.capabilities.max_drafts == 3 and made.capabilities.has_sequence_state
    plain, _ = run(made, (5, 3), params, no_drafts, num_tokens=5)
    found, _ = run(made, (5, 3), params, oracle(plain, (3, 2), 0.6), num_tokens=5, swaps=swaps)
    assert found == plain
    made.close()


@pytest.mark.parametrize("has_states", [False, True])
def test_steps_after_the_last_drafts_leave_the_output_unchanged(
    executable: Executable, has_states: bool
) -> None:
    """Steps without any drafts follow a step with accepted drafts."""
    made = executable
    if has_states:
        model = tiny_model(std=0.3, model_type="qwen3_5", **ON_CUDA)
        made = compiled(model, "cuda", precision=precision_of("bf16"), max_drafts=3)
    plain, _ = run(made, (3,), SAMPLED, no_drafts, num_tokens=5)
    first = oracle(plain, (2,), 1.0)
    found, num_steps = run(
        made, (3,), SAMPLED, lambda n, done: () if done else first(n, done), num_tokens=5
    )
    assert found == plain and num_steps == 3
    if has_states:
        made.close()


def test_scheduler_with_ngram_drafts_leaves_the_output_unchanged(executable: Executable) -> None:
    def outputs(speculative: SpeculativeConfig | None) -> tuple[list[list[int]], int]:
        loop = EngineLoop(executable, policy=SchedulerConfig(speculative=speculative))
        params = (SamplingParams(max_tokens=6), replace(FILTERED, max_tokens=3))
        prompts = ((7, 8, 9) * 3, (1, 2, 1, 2))
        every = [RequestState(n, prompts[n], params[n]) for n in range(2)]
        loop.generate(every)
        return [request.output for request in every], every[0].num_draft_tokens

    config = SpeculativeConfig(max_drafts=3, min_lookup=1, max_lookup=2, schedule=((1, 9, 3),))
    plain, drafted = outputs(None), outputs(config)
    assert drafted[0] == plain[0] and drafted[1] > plain[1] == 0


def test_speculative_config_reserves_rows() -> None:
    texts = ('{"method": "ngram", "num_speculative_tokens": 3}', None)
    options = [EngineConfig(speculative_config=text).compile_options("cuda", 64) for text in texts]
    assert [each.max_drafts for each in options] == [3, 0]
    config = EngineConfig(speculative_config=texts[0])
    assert [config.invariance("cuda", count) for count in (4, 5)] == ["always", "auto"]


def test_drafts_launch_attention_twice_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first launch stores keys and values: a block for each of 4 rows and 8 heads."""
    config = config_of_hf({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 1}, where="")
    plan = plan_of(config, precision_of("bf16"))
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        steps = steps_of(plan, max_rows=4, max_context=4096, strict_rows=4)
        steps.decode(rows_of(4), reach=8)
        plain = [*launches.kernels]
        launches.clear()
        attended: list[tuple[tuple[int, int, int], int, bool]] = []
        launch = nvrtc.launch

        def recorded(source: Any, name: str, *, at: Any, arguments: Any, **how: Any) -> None:
            if source.path.stem == "attention":
                attended.append((at.blocks, arguments.window, bool(arguments.early)))
            launch(source, name, at=at, arguments=arguments, **how)

        with monkeypatch.context() as patch:  # undone before the recorded launches are
            patch.setattr(nvrtc, "launch", recorded)
            steps.decode(rows_of(4), reach=8, has_drafts=True)
    (at,) = (n for n, name in enumerate(plain) if name.startswith("attention:"))
    assert launches.kernels == [*plain[: at + 1], *plain[at:]]
    assert [attended[0], attended[1][1:]] == [((1, 4, 8), 1, False), (0, False)]


def test_drafts_launch_the_delta_rule_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step with 4 rows, and in a replay."""
    text = {**SHAPES["qwen3.5-35b-a3b"], "num_hidden_layers": 4}
    program = plan_of(config_of_hf(text, where=""), precision_of("bf16"))
    with recorded_gpu(monkeypatch, (9, 0)) as launches:
        steps = steps_of(program, max_rows=4, max_context=4096, max_drafts=3)
        counts = torch.zeros(4, dtype=torch.int64, device=CUDA)
        rows = replace(rows_of(4), by_slot=SlotRows(counts, counts))
        steps.decode(rows, has_drafts=True)
        assert [name for name in launches.kernels if "delta" in name] == 3 * [ROWS_KERNEL]
        launches.clear()
        steps.replay(rows)
        assert launches.kernels == 3 * [ROWS_KERNEL]


@pytest.mark.gpu(memory_gb=14)
@pytest.mark.parametrize(
    ("precision", "slots"),
    [("bf16", "2"), ("bf16", "16"), ("bf16", "64/16"), ("all-bfp8", "16"), ("performance", "16")],
)
def test_strict_steps_with_drafts_keep_every_bit(precision: str, slots: str) -> None:
    run_process("strict_drafts", "llama-3.2-1b", precision, slots)
