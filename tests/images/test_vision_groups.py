"""Tensor groups of towers and cross-attention: a configuration's formats, and ``--explain``."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.cli.measure.explain import explain_precision
from tilewright.compiler.driver import lower_tower, resolve_precision
from tilewright.compiler.ir.info import info
from tilewright.compiler.precision import load_precision
from tilewright.models import load_model

TOWER = {"vision_wqkv": "bfp4", "vision_ff": "bf16", "projector": "fp32"}
CROSS = {"cross_wkv": "bfp2", "cross_wq": "bfp4", "cross_kv_cache": "bfp8"}


@pytest.mark.parametrize("shape", ["tiny-vision", "tiny-hybrid-vision"])
def test_formats_of_a_file_reach_the_tower_and_explain(shape: str, tmp_path: Path) -> None:
    has_cross_layers = shape == "tiny-vision"
    groups = TOWER | (CROSS if has_cross_layers else {})
    path = tmp_path / "own.yaml"
    words = ", ".join(f"{group}: {name}" for group, name in groups.items())
    path.write_text(f"inherits: accuracy\nprecision: {{{words}}}\n")
    model, precision = load_model(f"shape:{shape}"), load_precision(str(path))
    resolved = resolve_precision(model, precision)
    lowered = lower_tower(model, resolved)
    assert lowered is not None
    facts = map(info, lowered[0].graph.nodes)
    found = {f.tensor_group: f.formats.in1 for f in facts if f.formats and f.tensor_group in groups}
    in_tower = {group: name for group, name in groups.items() if group in (*TOWER, "cross_wkv")}
    assert found == in_tower
    out = io.StringIO()
    screen = Console(file=out, width=200)
    explain_precision(screen, resolved.summary(precision.name))
    lines = out.getvalue().splitlines()
    for group, name in groups.items():
        assert any(
            {group, name, "own.yaml"} <= set(line.replace("/", " ").split()) for line in lines
        )
