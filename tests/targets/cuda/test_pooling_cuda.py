"""Pooled hidden states on the cuda target: the reference's, in chunks and beside decode rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.targets.cuda.test_conformance_cuda import SMALL
from tests.targets.test_pooling import embed
from tests.tiny import compiled, precision_of, random_tokens, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.outputs.pooled_states import pool_rows
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.pooling import LAST, MEAN, Pooling
from tilewright.runtime.scheduling.request_state import RequestState


def test_pooled_states_on_cuda_are_the_reference_s() -> None:
    model, precision = tiny_model(std=0.2, **SMALL), precision_of("bf16")
    executable = compiled(model, "cuda", precision=precision)
    assert executable.capabilities.hidden_size == model.config.hidden_size
    prompt = random_tokens(20, vocab_size=model.config.vocab_size)
    (mean,) = embed(executable, [prompt], MEAN, step_tokens=16)
    (last,) = embed(executable, [prompt], LAST)
    reference = compiled(model, precision=precision)
    for kind, got in ((MEAN, mean), (LAST, last)):
        (expected,) = embed(reference, [prompt], kind)
        np.testing.assert_allclose(got, expected, atol=1e-3)
    executable.close()


def test_rows_are_pooled_in_parts_as_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(11, 8), torch.rand(8)
    whole = pool_rows(x, (weight, 1e-5))
    monkeypatch.setattr("tilewright.compiler.targets.cuda.outputs.pooled_states._ROWS", 4)
    torch.testing.assert_close(pool_rows(x, (weight, 1e-5)), whole)
    torch.testing.assert_close(pool_rows(x, None), torch.stack((x.sum(0), x[-1])))


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_pooling_beside_answers_on_a_gpu(compute: str) -> None:
    """Answers are those without, and vectors are the reference's; several steps are under way."""
    sizes: dict[str, Any] = {"hidden_size": 256, "num_heads": 4, "num_kv_heads": 2}
    model = tiny_model(std=0.06, **{**sizes, "head_dim": 64, "intermediate_size": 512})
    precision = precision_of("bf16")
    executable = compiled(
        model, "cuda", precision=precision, compute=compute, max_batch=8, max_context=512
    )
    reference = compiled(model, precision=precision, max_context=512)
    loop = EngineLoop(executable)
    loop.warm_up()
    prompts = [
        tuple(random_tokens(n, vocab_size=model.config.vocab_size, seed=n))
        for n in (1, 70, 200, 500)
    ]
    answers = [
        RequestState(n, p[:100], SamplingParams(max_tokens=12)) for n, p in enumerate(prompts)
    ]
    loop.generate(answers)
    again = [RequestState(9, each.prompt, each.sampling) for each in answers]
    asked = [RequestState(9, p, pooling=Pooling(kind)) for p in prompts for kind in (MEAN, LAST)]
    loop.generate([*again, *asked])
    assert [each.output for each in again] == [each.output for each in answers]
    within = 1e-3 if compute == "exact" else 0.02
    for each in asked:
        assert each.pooling is not None and each.pooling.vector is not None
        (expected,) = embed(reference, [list(each.prompt)], each.pooling.kind)
        np.testing.assert_allclose(each.pooling.vector, expected, atol=within)
    executable.close()
