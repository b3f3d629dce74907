"""Engines of mixtures of experts with linear attention, on a CPU: against the compiler's reference
target, on any calls, and what is refused.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5_moe import make
from tests.tiny import lowered, prefill
from tilewright.compiler.driver import compile_model, weight_source
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.emit import emit_engine
from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import HYBRID_CONFIG
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.interface.base import CompileOptions, Emission
from tilewright.errors import CompileError
from tilewright.evaluate.measure.engine_check import load_engine
from tilewright.loading.engine_config import engine_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``--emit engine`` writes of a model with large weights: every part of it counts."""
    model, folder = make(), tmp_path_factory.mktemp("hybrid")
    graph, _ = lowered(model, target="cuda", precision=load_precision("reference"))
    unused: Any = None
    emission = Emission(
        lower=unused,
        get_weight=weight_source(model),
        constants=unused,
        write=lambda name, data: (folder / name).write_bytes(data),
        folder=folder,
        options=CompileOptions(max_context=8),
        title="a test",
        progress=lambda what, done, total: None,
        settings={"model_config": engine_config(model.config)},
    )
    emit_engine(lower_to_program(graph), emission)
    return folder


@pytest.fixture(scope="module")
def hybrid(emitted: Path) -> Any:
    """The file, imported."""
    return load_engine(str(emitted / "engine.py"))


def made(hybrid: Any, folder: Path, *, seed: int = 0) -> tuple[Any, Any, Any]:
    settings = hybrid.FAMILY.read_settings(HYBRID_CONFIG, CPU)
    torch.save(hybrid.random_weights(settings, seed), folder / "model.pt")
    engine = hybrid.create_engine(HYBRID_CONFIG, str(folder), "cpu")
    reference = hybrid.HybridReference(hybrid.load_weights(str(folder), settings), settings, CPU)
    return engine, reference, settings


def test_the_logits_are_the_reference_targets(hybrid: Any, emitted: Path) -> None:
    compiled = compile_model(
        make(),
        load_precision("reference"),
        target="reference",
        options=CompileOptions(max_context=32),
    )
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    expected = prefill(compiled.executable, tokens)
    config = json.loads((emitted / "model_config.json").read_text())
    engine = hybrid.create_engine(config, emitted / "weights", "cpu")
    other = torch.tensor([8, 9])
    first, _ = engine.prefill([1, 2], [torch.tensor(tokens[:7]), other])
    assert torch.allclose(first, expected[6], atol=2e-4)
    for place in range(7, len(tokens)):  # another request beside it, before and behind
        ids = [1, 2] if place % 2 else [2, 1]
        both = torch.tensor([tokens[place], 7] if place % 2 else [7, tokens[place]])
        logits = engine.decode(ids, both)[ids.index(1)]
        assert torch.allclose(logits, expected[place], atol=2e-4)


def test_random_calls_have_the_logits_of_the_files_reference(hybrid: Any, tmp_path: Path) -> None:
    """Any order, any of the requests, replaced and removed ones."""
    engine, reference, settings = made(hybrid, tmp_path)
    assert hybrid.compare(engine, reference, settings, seed=3, operations=30)[0] < 0.01


def test_rows_with_experts_all_but_equal_are_not_compared(hybrid: Any, tmp_path: Path) -> None:
    """In 16 bits rounding chooses between them: by itself that is 1.6 of the tolerance here."""
    _, _, exact = made(hybrid, tmp_path)
    half = dataclasses.replace(exact, dtype=torch.float16)
    tensors = hybrid.load_weights(str(tmp_path), exact)
    engine = hybrid.Engine(hybrid.FAMILY.on_cpu(tensors, half, CPU), half)
    reference = hybrid.HybridReference(tensors, half, CPU)
    calls = hybrid.Operations(half, 0)
    assert max(calls.step(engine, reference) for _ in range(2)) < 0.3
    assert 0 < calls.num_undecided < 9
    tied = {name: tensor.clone() for name, tensor in tensors.items()}
    tied["layers.1.mlp.gate.weight"][:] = tied["layers.1.mlp.gate.weight"][:1]
    always = hybrid.HybridReference(tied, exact, CPU)
    always.prefill([3], [torch.tensor([1, 2])])
    assert not always.is_decided(3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_calls_with_other_weights(seed: int, hybrid: Any, tmp_path: Path) -> None:
    engine, reference, settings = made(hybrid, tmp_path, seed=seed)
    assert hybrid.compare(engine, reference, settings, seed=seed, operations=100)[0] < 0.01


BAD_CONFIGS: dict[str, dict[str, Any]] = {
    "no 'num_experts'": {"num_experts": None},
    "num_experts_per_tok 9; allowed: up to num_experts 8": {"num_experts_per_tok": 9},
    "linear_num_value_heads 3; allowed: a multiple of": {"linear_num_value_heads": 3},
    "layer_types; allowed: 4 times": {"layer_types": ["full_attention"]},
    "partial_rotary_factor turns 1.6 of 32": {"partial_rotary_factor": 0.05},
    "rope_style 'interleaved'; allowed for this model: half": {"rope_style": None},
}


@pytest.mark.parametrize("said", BAD_CONFIGS)
def test_a_bad_configuration_is_refused_by_key(said: str, hybrid: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        hybrid.create_engine({**HYBRID_CONFIG, **BAD_CONFIGS[said]}, tmp_path, "cpu")


def test_a_missing_expert_is_named(hybrid: Any, tmp_path: Path) -> None:
    made(hybrid, tmp_path)
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    del state["layers.2.mlp.experts.down_proj"]
    torch.save(state, tmp_path / "model.pt")
    said = r"no layers.2.mlp.experts.down_proj; expected: of shape \[8, 128, 64\]"
    with pytest.raises(ValueError, match=said):
        hybrid.create_engine(HYBRID_CONFIG, tmp_path, "cpu")


def test_only_such_a_file_has_what_it_needs(hybrid: Any, module: Any) -> None:
    own = ("DeltaRule", "Experts", "HybridSettings", "HybridReference", "HYBRID_CONFIG")
    assert all(hasattr(hybrid, name) and not hasattr(module, name) for name in own)
    assert not hasattr(hybrid, "SMALL_CONFIG") and not hasattr(hybrid, "LLAMA")
    assert len(Path(hybrid.__file__).read_text("utf-8").splitlines()) < 3200


def test_layers_of_another_form_are_refused() -> None:
    from tests.models.test_experts_gguf import make as other

    for kind in ("qwen3_next", "qwen3_5"):
        graph, _ = lowered(other(kind), target="cuda")
        with pytest.raises(CompileError, match=r"qwen3_5_moe|not a whole tensor|no layer"):
            engine_plan(lower_to_program(graph))
        assert json.dumps(engine_config(other(kind).config))


@pytest.mark.slow
def test_the_file_of_35b_a3b_is_emitted() -> None:
    """Of its real shape, without its weights."""
    from tilewright.compiler.driver import lower_model, resolve_precision
    from tilewright.compiler.targets.cuda.engine_generator.emit import choices_for
    from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
    from tilewright.compiler.targets.interface.compiled import silent
    from tilewright.compiler.targets.table import get_target
    from tilewright.models import load_model

    model = load_model("shape:qwen3.5-35b-a3b")
    resolved = resolve_precision(model, load_precision("reference"))
    graph, _ = lower_model(model, resolved, get_target("cuda").stages(), silent)
    plan, config = engine_plan(lower_to_program(graph)), engine_config(model.config)
    choices = choices_for(plan, {**config, "torch_dtype": "bfloat16"})
    text = engine_text(plan, choices, title="35B-A3B", num_layers=40)
    compile(text, "engine.py", "exec")
    assert len(text.splitlines()) < 6400
    assert engine_config(model.config)["num_experts"] == 256
