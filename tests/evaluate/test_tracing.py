"""Traces of tiny models: a planted fault, restored runs, agreement with whole runs."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import precision_of, tiny_model
from tilewright.evaluate.tracing import layer_trace
from tilewright.evaluate.tracing.layer_trace import trace

TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))


def test_trace_of_exact_weights_has_no_loss() -> None:
    found = trace(tiny_model(std=0.3), precision_of("fp32"), TOKENS)
    assert found.top1 == 1.0 and abs(found.kl) < 1e-6
    assert all(not row.own_error and not row.kl_gain for row in found.rows)


def test_trace_finds_a_planted_fault_first() -> None:
    original, faulty = tiny_model(std=0.3), tiny_model(std=0.3)
    name = "model.layers.1.mlp.down_proj.weight"
    faulty.checkpoint.tensors[name] = -faulty.checkpoint.tensors[name]
    found = trace(faulty, precision_of("bfp8"), TOKENS, original=original)
    first = found.rows[0]
    assert (first.place, first.operation) == ("layer 1", "ff2")
    assert first.kl_gain is not None and first.kl_gain > 0.5 * found.kl
    assert first.own_error is not None and abs(first.own_error - 2) < 0.1
    fast = trace(faulty, precision_of("bfp8"), TOKENS, original=original, restores=False)
    assert (fast.rows[0].place, fast.rows[0].operation) == ("layer 1", "ff2")
    assert fast.kl == found.kl and fast.num_positions == 48


def test_trace_restores_one_operation_at_a_time() -> None:
    model = tiny_model(std=0.3)
    found = trace(model, precision_of("bfp4"), TOKENS)
    places = {(row.place, row.operation) for row in found.rows}
    assert len(places) == len(found.rows) == 2 * 4 + 1
    by_place = {(row.place, row.operation): row for row in found.rows}
    one = by_place["layer 0", "wo"]
    alone = trace(model, precision_of("bfp4", layers="0: {wo: fp32}"), TOKENS)
    assert one.kl_gain is not None and abs(found.kl - one.kl_gain - alone.kl) < 1e-5


def test_a_long_trace_scores_positions_at_equal_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """All positions run: errors stay, and a restored head still has its whole gain."""
    model = tiny_model(std=0.3)
    whole = trace(model, precision_of("bfp4"), TOKENS)
    monkeypatch.setattr(layer_trace, "_SCORED", 20)
    found = trace(model, precision_of("bfp4"), TOKENS)
    assert (whole.num_positions, found.num_positions) == (48, 16)
    errors = [
        {(row.place, row.operation): row.error for row in each.rows if row.place != "head"}
        for each in (whole, found)
    ]
    assert errors[0] == errors[1]
    assert found.kl != whole.kl and abs(found.kl - whole.kl) < 0.5 * whole.kl
    assert all(row.kl_gain is not None for row in found.rows)
