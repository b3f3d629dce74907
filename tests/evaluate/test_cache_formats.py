"""Cache formats of a tiny model: separate losses, the bound, and the YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import precision_of, tiny_model
from tilewright.compiler.driver import resolve_precision
from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.search.levels import SweepUnit
from tilewright.evaluate.tracing.cache_formats import (
    CacheProbe,
    select_formats,
    selection_yaml,
)
from tilewright.evaluate.tracing.logits import divergences

TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(0))
NAMES = ("bfp8", "bfp4")


@pytest.fixture(scope="module")
def probe() -> CacheProbe:
    return CacheProbe(tiny_model(std=0.3), precision_of("fp32"), TOKENS)


def test_losses_equal_whole_runs_with_a_single_rounded_unit(probe: CacheProbe) -> None:
    losses = probe.losses(NAMES)
    assert {str(unit) for unit, _ in losses} == {
        f"{layer}.{group}" for layer in (0, 1) for group in ("kv_cache", "v_cache")
    }
    for (unit, name), loss in losses.items():
        whole = probe.measure({unit: name})
        assert whole.kl == pytest.approx(loss.kl, rel=1e-2)
    assert all(losses[unit, "bfp4"].kl > losses[unit, "bfp8"].kl > 0 for unit in probe.units)


def test_selection_is_within_its_bound_and_smaller_than_uniform(probe: CacheProbe) -> None:
    whole = {name: probe.measure(dict.fromkeys(probe.units, name)) for name in NAMES}
    bound = (whole["bfp8"].kl * whole["bfp4"].kl) ** 0.5
    selection = select_formats(probe, NAMES, bound)
    assert selection.measured.is_within(bound)
    assert 4.5 < selection.bits < 8.5
    assert set(selection.formats) == set(probe.units)
    with pytest.raises(ConfigError, match="allowed: a larger bound or format"):
        select_formats(probe, NAMES, whole["bfp8"].kl / 2)


def test_selection_of_a_loose_bound_has_the_smallest_format(probe: CacheProbe) -> None:
    assert set(select_formats(probe, NAMES, 100).formats.values()) == {"bfp4"}


def test_yaml_of_a_selection_has_its_formats(probe: CacheProbe, tmp_path: Path) -> None:
    whole = probe.measure(dict.fromkeys(probe.units, "bfp4"))
    selection = select_formats(probe, NAMES, 0.5 * whole.kl)
    base = load_precision("performance")
    path = tmp_path / "selected.yaml"
    path.write_text(selection_yaml(base, selection, ["provenance"]))
    model = tiny_model(std=0.3)
    resolved, usual = (resolve_precision(model, p) for p in (load_precision(str(path)), base))
    for unit, name in selection.formats.items():
        assert resolved.format(unit.group, layer=unit.layer) == name
    for layer in (0, 1):
        assert resolved.format("ff1_3", layer=layer) == usual.format("ff1_3", layer=layer)
        assert resolved.fidelity("sdpa", "decode", layer=layer) == usual.fidelity(
            "sdpa", "decode", layer=layer
        )
    assert SweepUnit("v_cache", 1) in selection.formats


def test_divergences_of_logit_differences_equal_those_of_probabilities() -> None:
    random = torch.Generator().manual_seed(0)
    truth, off = (torch.randn(3, 16, generator=random) for _ in range(2))
    head = torch.randn(5000, 16, generator=random).bfloat16().float()
    for scale in (1e-4, 0.1, 1.0):
        run = truth + scale * off
        wanted, own = ((x.double() @ head.double().T).log_softmax(-1) for x in (truth, run))
        kl = (wanted.exp() * (wanted - own)).sum(-1)
        torch.testing.assert_close(
            divergences([run], truth, head)[0].double(), kl, rtol=0.02, atol=0
        )
