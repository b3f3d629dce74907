"""The contract of generated engines, on a CPU: any calls, any sizes, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from tests.targets.cuda.engine_generator.conftest import CONFIG, Folder
from tilewright.evaluate.measure.engine_calls import EngineTrace, cases

SIZES: dict[str, dict[str, Any]] = {
    "heads of 192, as the hidden model's": {"head_dim": 192, "num_attention_heads": 2},
    "grouped heads of 64": {"head_dim": 64, "num_key_value_heads": 2},
    "heads of 128, half rotation": {"head_dim": 128, "rope_style": "half"},
    "an odd vocabulary": {"vocab_size": 61, "head_dim": None, "num_key_value_heads": 1},
    "one layer, llama3 rotation": {
        "num_hidden_layers": 1,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "a tied head": {},
}


def sized(name: str) -> dict[str, Any]:
    heads = SIZES[name].get("num_attention_heads", 4)
    return {**CONFIG, "num_key_value_heads": heads, **SIZES[name]}


def compared(module: Any, config: dict[str, Any], folder: str, *, seed: int, calls: int) -> float:
    device = torch.device("cpu")
    settings = module.read_settings(config, device)
    engine = module.create_engine(config, folder, "cpu")
    reference = module.Reference(module.load_weights(folder, settings), settings, device)
    worst: float
    worst, _ = module.compare(engine, reference, settings, seed=seed, operations=calls)
    return worst


@pytest.mark.parametrize("name", SIZES)
def test_random_calls_have_the_logits_of_the_reference(
    name: str, module: Any, folder: Folder
) -> None:
    made = folder(sized(name), tied=name == "a tied head")
    assert compared(module, sized(name), made, seed=1, calls=25) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_with_other_weights(seed: int, module: Any, folder: Folder) -> None:
    for name in SIZES:
        made = folder(sized(name), seed=seed, tied=name == "a tied head")
        assert compared(module, sized(name), made, seed=seed, calls=60) < 0.01


@pytest.mark.slow
def test_ten_thousand_calls(module: Any, folder: Folder) -> None:
    assert compared(module, CONFIG, folder(), seed=0, calls=10_000) < 0.01


@pytest.mark.parametrize("name", cases())
def test_every_case(name: str, module: Any, folder: Folder) -> None:
    device, made = torch.device("cpu"), folder()
    settings = module.read_settings(CONFIG, device)
    trace = EngineTrace(cases(4)[name], settings.vocab_size, "cpu")
    reference = module.Reference(module.load_weights(made, settings), settings, device)
    ours = trace.run(module.create_engine(CONFIG, made, "cpu"))
    for logits, expected in zip(ours, trace.run(reference), strict=True):
        assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-3)


def prompt(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens)


def test_a_prompt_replaces_its_request_alone(module: Any, folder: Folder) -> None:
    engine = module.create_engine(CONFIG, folder(), "cpu")
    both = engine.prefill([1, 2], [prompt(3, 4, 5), prompt(6, 7)])
    again = engine.prefill([2], [prompt(3, 4, 5)])
    assert torch.allclose(again[0], both[0], atol=1e-6)
    after = engine.decode([2, 1], prompt(8, 8))
    assert torch.allclose(after[0], after[1], atol=1e-6)
    engine.remove([1, 77])
    with pytest.raises(KeyError, match="request 1 is not alive"):
        engine.decode([2, 1], prompt(9, 9))
    assert engine.decode([], prompt()[:0].long()).shape == (0, CONFIG["vocab_size"])


REFUSED = {
    "request 3 is named twice": lambda e: e.prefill([3, 3], [prompt(1), prompt(1)]),
    "request 1 is named twice": lambda e: e.decode([1, 1], prompt(1, 1)),
    "2 requests and 1 prompts": lambda e: e.prefill([5, 6], [prompt(1)]),
    "1 requests and 2 tokens": lambda e: e.decode([1], prompt(1, 2)),
    "has 0 tokens; allowed: 1 to 96": lambda e: e.prefill([5], [prompt(1)[:0]]),
    "has 97 tokens; allowed: 1 to 96": lambda e: e.prefill([5], [torch.ones(97).long()]),
    "token 96; allowed: 0 to 95": lambda e: e.prefill([5], [prompt(96)]),
    "token -1; allowed: 0 to 95": lambda e: e.decode([1], prompt(-1)),
    "allowed: int64, one axis": lambda e: e.decode([1], torch.ones(1)),
    "all 96 positions that the model allows": lambda e: e.decode([2], prompt(1)),
}


def test_a_refused_call_changes_nothing(module: Any, folder: Folder) -> None:
    engine, made = module.create_engine(CONFIG, folder(), "cpu"), prompt(4, 5)
    engine.prefill([1, 2], [made, torch.arange(96)])
    for said, call in REFUSED.items():
        with pytest.raises(ValueError, match=said):
            call(engine)
    expected = module.create_engine(CONFIG, folder(), "cpu")
    expected.prefill([1], [made])
    ours = engine.decode([1], prompt(6))
    assert torch.allclose(ours, expected.decode([1], prompt(6)), atol=1e-6)


def test_memory_goes_with_the_engine_at_once(module: Any, folder: Folder) -> None:
    made = folder()
    gc.disable()
    try:
        for _ in range(50):
            engine = module.create_engine(CONFIG, made, "cpu")
            engine.prefill([1], [prompt(1, 2, 3)])
            held = [weakref.ref(engine._executor), weakref.ref(engine._sequences[1])]
            held += [weakref.ref(each.weight) for each in engine._executor.program[:2]]
            engine.remove([1])
            assert held[1]() is None
            del engine
            assert [each() for each in held] == [None] * 4
    finally:
        gc.enable()


def test_create_engine_frees_host_weights_before_the_rehearsal(
    module: Any, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed pages leave the processor's caches cold for the first call."""

    class Weights(dict[str, Any]):
        pass

    loaded = list[weakref.ref[Any]]()
    seen = list[Any]()

    def load(*arguments: Any) -> Weights:
        weights = Weights(load_weights(*arguments))
        loaded.append(weakref.ref(weights))
        return weights

    load_weights = module.load_weights
    monkeypatch.setattr(module, "load_weights", load)
    monkeypatch.setattr(module.Engine, "rehearse", lambda engine: seen.append(loaded[0]()))
    module.create_engine(CONFIG, folder(), "cpu")
    assert seen == [None]
