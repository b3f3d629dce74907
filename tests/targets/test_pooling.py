"""Pooled hidden states: transformers' last hidden state on every target, in any chunks."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny import QWEN2, compiled, random_tokens, tiny_model
from tests.twins import twin_of
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import CloseSlot, OpenSlot, PrefillChunk, Slot, Step
from tilewright.errors import RequestError
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.pooling import LAST, MEAN, Pooling
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "reference": ("reference", {}),
    "native": ("cpu-native", {}),
    "onnxruntime": ("cpu", {}),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {**QWEN2, "tie_embeddings": False},
    "windows": {"model_type": "mistral", "windows": (8, 8), "num_layers": 2},
}


def theirs(model: SimpleNamespace, tokens: list[int], kind: str) -> np.ndarray:
    """The unit vector that transformers' base model gives."""
    twin = twin_of(model.config, model.checkpoint.tensors)
    with torch.no_grad():
        states = twin.model(torch.tensor([tokens])).last_hidden_state[0].double()
    pooled = states.mean(0) if kind == MEAN else states[-1]
    return (pooled / pooled.norm()).float().numpy()


def embed(
    executable: Executable, prompts: list[list[int]], kind: str, **policy: Any
) -> list[np.ndarray]:
    loop = EngineLoop(executable, policy=SchedulerConfig(**policy))
    requests = [RequestState(at, tuple(p), pooling=Pooling(kind)) for at, p in enumerate(prompts)]
    loop.generate(requests)
    found = [each.pooling.vector for each in requests if each.pooling is not None]
    assert all(each is not None for each in found) and not loop.has_work()
    return [each for each in found if each is not None]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", TARGETS)
def test_pooled_states_are_transformers(target: str, name: str) -> None:
    model = tiny_model(std=0.2, **MODELS[name])
    where, options = TARGETS[target]
    executable = compiled(model, where, **options)
    assert executable.capabilities.hidden_size == model.config.hidden_size
    prompts = [random_tokens(n, vocab_size=model.config.vocab_size, seed=n) for n in (1, 23, 7, 38)]
    for kind in (MEAN, LAST):
        for policy in ({}, {"step_tokens": 5}):
            for prompt, got in zip(
                prompts, embed(executable, prompts, kind, **policy), strict=True
            ):
                np.testing.assert_allclose(got, theirs(model, prompt, kind), atol=1e-4)
    executable.close()


@pytest.mark.parametrize("target", TARGETS)
def test_pooling_beside_answers_changes_neither(target: str) -> None:
    """Rows that decode go on; a prompt that was cached is computed again where its mean is asked
    for, and taken where its last state is.
    """
    model = tiny_model(std=0.2)
    executable = compiled(model, TARGETS[target][0], max_batch=4, max_context=200)
    prompt = tuple(random_tokens(160, vocab_size=model.config.vocab_size))
    loop = EngineLoop(executable)
    alone = RequestState(0, prompt, SamplingParams(max_tokens=8))
    loop.generate([alone])
    answer = RequestState(1, prompt, SamplingParams(max_tokens=8))
    means = [RequestState(2 + at, prompt, pooling=Pooling(MEAN)) for at in range(2)]
    last = RequestState(4, prompt, pooling=Pooling(LAST))
    loop.generate([answer, *means, last])
    assert answer.output == alone.output
    assert last.num_cached > 0 == means[0].num_cached == means[1].num_cached
    for request in (*means, last):
        assert request.pooling is not None and request.pooling.vector is not None
        expected = theirs(model, list(prompt), request.pooling.kind)
        np.testing.assert_allclose(request.pooling.vector, expected, atol=1e-4)
        assert not request.output and request.finish_reason == "stop"
    executable.close()


def test_a_chunk_computed_again_counts_once() -> None:
    """After a preemption a prompt begins anew, perhaps in other chunks."""
    model = tiny_model(std=0.2)
    executable, tokens = (
        compiled(model),
        tuple(random_tokens(20, vocab_size=model.config.vocab_size)),
    )
    pooling = Pooling(MEAN)
    for cuts in ((0, 8, 15), (0, 3, 11, 20)):
        edits = (OpenSlot(Slot(0), SamplingParams()),)
        for start, end in itertools.pairwise(cuts):
            chunk = PrefillChunk(Slot(0), start, tokens[start:end], pools=True)
            (part,) = executable.step(Step(prompts=(chunk,), edits=edits)).parts
            pooled, edits = part.read().pooled, ()
            assert pooled is not None and part.slots == ()
            is_whole = pooling.take(start, pooled, len(tokens))
            assert is_whole == (end == 20)
        executable.step(Step(edits=(CloseSlot(Slot(0)),)))
    expected = theirs(model, list(tokens), MEAN)
    np.testing.assert_allclose(pooling.vector, expected, atol=1e-4)


def test_null_pools_zeros_and_a_target_without_states_refuses() -> None:
    model = tiny_model()
    executable = compiled(model, "null")
    (vector,) = embed(executable, [[1, 2, 3]], MEAN)
    assert vector.shape == (model.config.hidden_size,) and not vector.any()
    executable.capabilities = dataclasses.replace(executable.capabilities, hidden_size=0)
    with pytest.raises(RequestError, match="no hidden states; allowed: cpu"):
        embed(executable, [[1, 2, 3]], MEAN)
