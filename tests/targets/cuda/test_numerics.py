"""What the cuda target says of formats and fidelities, and how it holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.targets.test_weight_storage import ask_for
from tests.tiny import lowered, precision_of, tiny_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.contract.record import EMULATED, HONOURED, NOT_HONOURED
from tilewright.compiler.targets.cuda.numerics import (
    cache_kind,
    format_values,
    meanings,
    storage_format,
)
from tilewright.compiler.targets.interface.base import CompileOptions, WeightStorage
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CompileError


def recipe(name: str, axis: str = "in") -> WeightRecipe:
    return WeightRecipe((Segment("w", 32),), (32, 48), name, axis)


@pytest.mark.parametrize(
    ("name", "axis", "group", "kind"),
    [
        ("bf16", "in", "ff2", "bf16"),
        ("bfp8", "in", "ff2", "bfp8"),
        ("bfp4", "in", "lm_head", "bfp4"),
        ("bfp2", "in", "ff2", "bf16"),
        ("bfp8", "out", "ff2", "bf16"),
        ("bfp4", "out", "wqkv", "bf16"),
        ("bfp8", "in", "embedding", "bf16"),
        ("bfp4", "in", "embedding", "bf16"),
    ],
)
def test_blocks_along_in_are_held_as_blocks(name: str, axis: str, group: str, kind: str) -> None:
    assert storage_format(recipe(name, axis), group) == kind


@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4", "bfp2"])
@pytest.mark.parametrize("axis", ["in", "out"])
def test_the_values_are_exact_in_bfloat16(name: str, axis: str) -> None:
    dense = torch.randn(32, 48)
    values = format_values(dense, recipe(name, axis))
    assert torch.equal(values.bfloat16().float(), values)
    expected = get_format(name).round_trip(dense, axis=-1 if axis == "in" else 0)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("name", ["fp32", "fp16", "q80", "q40"])
def test_other_formats_are_refused_wherever_they_are_asked_for(name: str) -> None:
    message = rf"w: format {name}.* on target cuda, .*; allowed: bf16, bfp8, bfp4, bfp2"
    with pytest.raises(CompileError, match=message):
        storage_format(recipe(name, "out"), "ff2")
    experts = replace(recipe(name), shape=(2, 16, 48))
    with pytest.raises(CompileError, match=message):
        storage_format(experts, "experts_ff2")
    assert meanings(exact=False).weight(name, "out").status == NOT_HONOURED


@pytest.mark.parametrize("group", ["ff2", "embedding"])
def test_codes_are_held_as_codes_and_honored(group: str) -> None:
    for name in ("q40", "q80", "q6_k"):
        assert storage_format(recipe(name), group) == name
        found = meanings(exact=False).weight(name, "in")
        assert (found.status, found.effective) == (HONOURED, name)


@pytest.mark.parametrize(
    ("changes", "is_rounded"),
    [({}, True), ({"copies": "codes"}, False), ({"copies": "none"}, False)],
)
def test_contract_names_the_rounding_of_codes_in_large_batches(
    changes: dict[str, str], is_rounded: bool
) -> None:
    precision = precision_of("q40", kv_cache="bf16")
    graph_module, _ = lowered(tiny_model(), target="cuda", precision=precision)
    options = CompileOptions(compute="fast", **changes)  # type: ignore[arg-type]
    text, rounded = (
        "bf16 codes x bf16, fp32 sums and scales",
        "; from 65 rows on bf16 values x bf16",
    )
    for is_strict in (False, True):
        changed = replace(options, is_strict=is_strict)
        entries = get_target("cuda").contract(graph_module, changed).entries
        found = {entry.meaning.effective for entry in entries if entry.field.startswith("li_")}
        assert found == {text + rounded * (is_rounded and not is_strict)}


def test_bytes_of_a_weight_by_hand() -> None:
    def ask(form: str, group: str = "ff2", axis: str = "in", shape: tuple[int, ...] = (33, 129)):
        return ask_for("cuda", shape, form, block_axis=axis, group=group)

    assert ask("bf16") == WeightStorage("bfloat16", 2 * 48 * 256)
    assert ask("bfp8") == WeightStorage("bfp8 blocks", 3 * 2 * (16 * 128 + 128))
    assert ask("bfp4") == WeightStorage("bfp4 blocks", 3 * 2 * (8 * 128 + 128))
    assert ask("bfp4", axis="out") == ask("bfp8", "embedding") == ask("bf16")
    assert ask("fp32", "", shape=(33,)) == WeightStorage("float32", 132)
    assert ask("q80") == WeightStorage("q80 codes", 3 * 2 * (16 * 128 + 4 * 16 * 2))
    assert ask("q40") == ask("q40", "embedding") == WeightStorage("q40 codes", 3 * 2 * 1152)
    with pytest.raises(CompileError, match="format q80 in blocks along out on target cuda"):
        ask("q80", axis="out")


@pytest.mark.parametrize(
    ("name", "fast"),
    [("bf16", "bf16"), ("bfp8", "bfp8"), ("fp32", "bf16"), ("fp16", "bf16"), ("bfp4", "bf16")],
)
def test_caches_are_kept_as_asked_or_in_bfloat16(name: str, fast: str) -> None:
    assert cache_kind(name, exact=False) == fast
    assert cache_kind(name, exact=True) == "fp32"
    found = meanings(exact=False).kv_cache(name)
    assert (found.status, found.effective) == (HONOURED if fast == name else NOT_HONOURED, fast)


def test_weights_mean_what_is_held() -> None:
    weight = meanings(exact=False).weight
    for name in ("bf16", "bfp8", "bfp4"):
        assert weight(name, "in") == weight(name, "in").__class__(HONOURED, name)
    assert weight("bfp8", "out").status == weight("bfp2", "in").status == EMULATED
    assert weight("bf16", "out").status == HONOURED


def test_a_fidelity_is_the_same_in_both_phases_and_none_is_lower_than_asked_in_exact() -> None:
    for asked in ("lofi", "hifi2", "hifi4"):
        found = {meanings(exact=False).fidelity("bfp8", "in", asked, p).effective for p in "pd"}
        assert found == {"bf16 x bf16, fp32 sums"}
        assert meanings(exact=True).fidelity("bfp8", "in", asked, "prefill").effective == "fp32"


@pytest.mark.parametrize("name", ["bfp8", "bf16"])
def test_attention_over_bfp8_pages_is_named(name: str) -> None:
    precision = precision_of("bf16", "hifi4", kv_cache=name)
    graph_module, _ = lowered(tiny_model(), target="cuda", precision=precision)
    found = get_target("cuda").contract(graph_module, CompileOptions(compute="fast")).entries
    of = {entry.field: entry.meaning.effective for entry in found}
    assert of["sdpa_prefill"] == "bf16 x bf16, fp32 sums and softmax"
    assert ("fp16 x fp16" in of["sdpa_decode"]) == (name == "bfp8")


def test_the_contract_names_every_part_of_a_graph() -> None:
    graph_module, _ = lowered(tiny_model(), target="cuda", precision=precision_of("bfp8", "hifi2"))
    fast, exact = (
        get_target("cuda").contract(graph_module, CompileOptions(compute=compute))
        for compute in ("fast", "exact")
    )
    effective = {entry.meaning.effective for entry in fast.entries}
    assert {"bfp8", "bf16 x bf16, fp32 sums"} <= effective
    assert fast.effective_id != exact.effective_id
    assert len(fast.entries) == len(exact.entries)
