"""A generated engine.py as a module, and small models for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import lowered, tiny_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Choices, Plan
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import random_weights
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import read_settings
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.evaluate.measure.engine_check import load_engine

CONFIG: dict[str, Any] = {
    "model_type": "tiny_llama",
    "torch_dtype": "float16",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
"""Heads of 24 channels, no power of two, whose width is not the hidden size."""


@pytest.fixture(scope="session")
def plan() -> Plan:
    """The plan of a Llama, from its typed program."""
    model = tiny_model(tie_embeddings=False)
    graph, _ = lowered(model, target="cuda", precision=load_precision("reference"))
    return engine_plan(lower_to_program(graph))


@pytest.fixture(scope="session")
def engine_file(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine.py."""
    path = tmp_path_factory.mktemp("engine") / "engine.py"
    path.write_text(engine_text(plan, Choices(), title="a test", num_layers=2), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def module(engine_file: Path) -> Any:
    """It, imported."""
    return load_engine(str(engine_file))


Folder = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Writes random weights of a configuration to ``model.pt``; the folder."""

    def make(config: dict[str, Any] = CONFIG, *, seed: int = 0, tied: bool = False) -> str:
        weights = random_weights(read_settings(config, torch.device("cpu")), seed)
        if tied:
            del weights["lm_head.weight"]
        torch.save(weights, tmp_path / "model.pt")
        return str(tmp_path)

    return make
