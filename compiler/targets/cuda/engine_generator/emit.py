"""Emission for ``--emit engine``: the engine file, its model configuration and its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from tilewright.compiler.targets.cuda.engine_generator.layers import engine_plan
from tilewright.compiler.targets.cuda.engine_generator.parts import plan as parts
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Choices,
    HybridPlan,
    NativeChoices,
)
from tilewright.compiler.targets.cuda.engine_generator.write import engine_text
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.interface.base import Emission
from tilewright.compiler.targets.program.instructions import KernelProgram


def emit_engine(plan: KernelProgram, emission: Emission) -> None:
    """Write ``engine.py``, ``model_config.json`` and ``weights/model.safetensors``.

    ``emission.settings`` contains ``model_config``.

    Raises:
        CompileError: Generated engines do not support the program.
    """
    names, tensors = _tensors_of(plan), {}
    for done, name in enumerate(names):
        emission.progress("weights", done, len(names))
        tensors[name] = emission.get_weight(name).contiguous()
    is_half = all(each.dtype == torch.float16 for each in tensors.values())
    dtype = "float16" if is_half else "bfloat16"
    config = {**emission.settings["model_config"], "torch_dtype": dtype}
    text = engine_source(plan, config, title=emission.title.partition(",")[0])
    emission.write("engine.py", text.encode())
    emission.write("model_config.json", (json.dumps(config, indent=2) + "\n").encode())
    (emission.folder / "weights").mkdir()
    save_tensors(tensors, emission.folder / "weights" / "model.safetensors")


def engine_source(plan: KernelProgram, config: Mapping[str, Any], *, title: str) -> str:
    """Return the text of ``engine.py`` for a ``model_config``, whose ``torch_dtype`` is the
    weights' type.

    Raises:
        CompileError: Generated engines do not support the program.
    """
    found, num_layers = engine_plan(plan), config["num_hidden_layers"]
    return engine_text(found, choices_for(found, config), title=title, num_layers=num_layers)


def choices_for(plan: parts.Plan, config: Mapping[str, Any]) -> Choices:
    """Select the faster kernels, tuned on an H200.

    Wide layers use CUDA C++ for small matmuls and, in bfloat16, for attention, experts and linear
    attention. Narrow layers, whose norms fit matmuls with several rows, and float16 mixtures use
    Triton only.
    """
    if config["hidden_size"] < _MIN_LARGE_WIDTH:
        return Choices()
    is_mixture = isinstance(plan, HybridPlan)
    if config["torch_dtype"] != "bfloat16":
        return Choices() if is_mixture else Choices(products="cuda")
    native = ("experts", "attention", "delta") if is_mixture else ("attention",)
    return NativeChoices(products="cuda", native=native)


def _tensors_of(plan: KernelProgram) -> list[str]:
    """Return every checkpoint tensor of a program once, in order."""
    found: list[str] = []
    for each in plan.instructions:
        convolve = getattr(each, "convolve", None)
        recipes = [getattr(each, field, None) for field in _WEIGHTS]
        for recipe in (*recipes, getattr(convolve, "weight", None)):
            found += () if recipe is None else recipe.names
    return list(dict.fromkeys(found))


_MIN_LARGE_WIDTH = 2048

_WEIGHTS = ("table", "norm", "weight", "q_norm", "k_norm", "a_log", "dt_bias")
"""Instruction fields that are weights."""
