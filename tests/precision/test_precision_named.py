"""The named configurations, written out for the models that the published tables are about."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tilewright.compiler.precision import PHASES, load_precision, parse_heading


class Full(NamedTuple):
    """The published keys in their order, two letters or so each."""

    formats: str
    fidelities: str

    def heading(self) -> str:
        """As one line."""
        groups = ("ff1_3", "ff2", "wqkv", "wo", "kv_cache")
        ops = ("li_ff1_3", "li_ff2", "li_qkv_decode", "li_o_decode", "sdpa_decode")
        ops += ("li_qkv_prefill", "li_o_prefill", "sdpa_prefill")
        formats = zip(groups, self.formats.split(), strict=True)
        fidelities = zip(ops, self.fidelities.split(), strict=True)
        return (
            f"precision_cfg = {{{', '.join(f'{k}: {v}' for k, v in formats)}, activation: mixed}},"
            f" fidelity_cfg = {{{', '.join(f'{k}: {v}' for k, v in fidelities)}}}"
        )


FAST = Full(
    "bfp4 bfp8 bfp8 bfp8 bfp8",
    "lofi hifi2 hifi2 hifi2 hifi2na hifi2 hifi2fp16 hifi4",
)
ROBUST = Full(
    "bfp8 bfp8 bfp8 bfp8 bfp8",
    "hifi2fp16 hifi2fp16 hifi2 hifi2 hifi2na hifi2 hifi2fp16 hifi4",
)
HIGH_ATTENTION = Full(
    "bfp8 bfp8 bf16 bf16 bf16",
    "hifi2 hifi2 hifi4 hifi4 hifi4 hifi4 hifi4 hifi4",
)

EXPECTED = {
    ("Llama-3.1-8B-Instruct", 32): (FAST, ROBUST),
    ("Llama-3.1-70B", 80): (FAST, FAST),
    ("Qwen2.5-7B", 28): (HIGH_ATTENTION, HIGH_ATTENTION),
    ("SmolLM2-135M-Instruct", 30): (FAST, HIGH_ATTENTION),
    ("Mistral-7B-Instruct-v0.3", 32): (FAST, ROBUST),
    ("Qwen2.5-72B", 80): (FAST, FAST),
    ("Llama-3.2-90B-Vision-Instruct", 100): (FAST, FAST),
    # As a GGUF file is called.
    ("Meta-Llama-3.1-8B-Instruct-Q8_0", 32): (FAST, ROBUST),
    ("mistral-7b-instruct-v0.3.Q4_K_M", 32): (FAST, ROBUST),
    ("qwen2.5-7b-instruct-f16", 28): (HIGH_ATTENTION, HIGH_ATTENTION),
}


@pytest.mark.parametrize(("model", "full"), EXPECTED.items(), ids=str)
def test_performance_and_accuracy(model: tuple[str, int], full: tuple[Full, Full]) -> None:
    name, num_layers = model
    for configuration, expected in zip(("performance", "accuracy"), full, strict=True):
        resolved = load_precision(configuration).resolve(num_layers, name)
        assert resolved.heading() == expected.heading()
        assert resolved.id == parse_heading(expected.heading()).resolve(num_layers).id
        for layer in (0, num_layers - 1):
            assert resolved.format("lm_head", layer=layer) == "bfp8"
            assert resolved.format("embedding", layer=layer) == "bf16"
            assert resolved.format("router", layer=layer) == "bf16"
            for group in ("ff1_3", "ff2"):
                dense = resolved.format(group, layer=layer)
                assert resolved.format(f"experts_{group}", layer=layer) == dense
            assert {resolved.fidelity("li_lm_head", phase) for phase in PHASES} == {"hifi2"}


def test_similar_names_are_other_models() -> None:
    """Matching is exact: no exception is found by a part of its name."""
    accuracy = load_precision("accuracy")
    for name in ("Llama-3.1-405B", "Llama-3.1-8B-Instruct-Turbo", "my-Mistral-7B", "Llama-3.1-8"):
        assert accuracy.resolve(4, name).heading() == HIGH_ATTENTION.heading()
    performance = load_precision("performance")
    for name in ("Qwen2.5-7", "Qwen2.5-7B-Math", "Qwen2-7B", "Qwen2.5-VL-7B-Instruct"):
        assert performance.resolve(4, name).heading() == FAST.heading()


@pytest.mark.parametrize(
    ("named", "stored", "title"),
    [
        ("stored", ("Q4_1", "Q8_0"), "stored (Q4_1, Q8_0)"),
        ("stored", (), "stored"),
        ("performance", ("Q4_1",), "performance (bfp4, bfp8)"),
        ("bf16", (), "bf16"),
        ("precision_cfg = {ff1_3: stored, ff2: bfp4}", ("Q8_0",), "heading (Q8_0, bfp4, bfp8)"),
    ],
)
def test_title_has_the_name_and_the_formats(
    named: str, stored: tuple[str, ...], title: str
) -> None:
    found = load_precision(named)
    assert found.resolve(4).summary(found.name).title(stored) == title
