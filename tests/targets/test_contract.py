"""The numeric contract: what is asked, what is done, and when two configurations are one."""

from __future__ import annotations

import pytest

from tests.tiny import compiled, lowered, precision_of, tiny_model
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import Meaning, Meanings, NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.table import get_target
from tilewright.errors import CompileError

OPTIONS = CompileOptions(max_batch=1, max_context=32)


def contract(
    precision: PrecisionConfig, target: str = "cpu", *, compute: str = "fast"
) -> NumericContract:
    graph_module, _ = lowered(tiny_model(num_layers=4), target=target, precision=precision)
    options = CompileOptions(max_batch=1, max_context=32, compute=compute)
    return get_target(target).contract(graph_module, options)


def lines(contract: NumericContract) -> list[str]:
    return [str(entry) for entry in contract.entries]


def test_every_field_of_a_configuration_has_its_line() -> None:
    found = lines(contract(precision_of("bfp8", "hifi2", embedding="bf16")))
    groups = ("ff1_3", "ff2", "wqkv", "wo", "lm_head")
    for group in groups:
        assert f"{group} weights: bfp8: honoured" in found
    assert "embedding weights: bf16: honoured" in found
    for group in ("ff1_3", "ff2", "qkv", "o", "lm_head"):
        for phase in ("prefill", "decode"):
            assert f"li_{group} {phase}: hifi2: emulated (int8 activations)" in found
    assert "sdpa_prefill: hifi2: not honoured (fp32)" in found
    assert "sdpa_decode: hifi2: not honoured (fp32)" in found
    assert "kv_cache: bfp8: not honoured (fp32)" in found
    assert "activation: mixed: not honoured (fp32)" in found
    assert len(found) == len(groups) + 1 + 2 * 5 + 2 + 1 + 1


def test_layers_are_spelled_in_ranges() -> None:
    rules = "0-1: {ff2: bfp4}, 3: {ff2: bfp4}"
    found = lines(contract(precision_of("bfp8", layers=rules)))
    assert "ff2 weights [0-1, 3]: bfp4: honoured" in found
    assert "ff2 weights [2]: bfp8: honoured" in found
    assert "wo weights: bfp8: honoured" in found


@pytest.mark.parametrize(
    ("name", "fidelity", "axis", "compute", "meaning"),
    [
        ("bfp8", "lofi", "in", "fast", Meaning("emulated", "int8 activations")),
        ("bfp4", "hifi2", "in", "fast", Meaning("emulated", "int8 activations")),
        ("bfp8", "hifi2", "in", "exact", Meaning("not honoured", "fp32")),
        ("bfp8", "hifi3", "in", "fast", Meaning("not honoured", "fp32")),
        ("bfp8", "lofi", "out", "fast", Meaning("not honoured", "fp32")),
        ("bf16", "lofi", "in", "fast", Meaning("not honoured", "fp32")),
        ("fp32", "hifi4", "in", "fast", Meaning("not honoured", "fp32")),
    ],
)
def test_fidelity_on_the_cpu(
    name: str, fidelity: str, axis: str, compute: str, meaning: Meaning
) -> None:
    found = contract(precision_of(name, fidelity, block_axis=axis), compute=compute)
    of_products = {e.meaning for e in found.entries if e.field.startswith("li_ff2")}
    assert of_products == {meaning}


ONE = precision_of("bfp8", "hifi4", kv_cache="bf16")


@pytest.mark.parametrize(
    "other",
    [
        precision_of("bfp8", "hifi4", kv_cache="bfp8"),
        precision_of("bfp8", "hifi4", kv_cache="bf16", activation="bf16"),
        precision_of("bfp8", "hifi3", kv_cache="bf16"),
        precision_of("bfp8", "hifi4", kv_cache="bf16", sdpa_prefill="lofi"),
        precision_of("bfp8", "hifi4", kv_cache="bf16", layers="2: {li_ff2: hifi3}"),
        precision_of("bfp8", "hifi4", kv_cache="bf16", layers="0-1: {kv_cache: bfp4}"),
        precision_of("bfp8", "hifi4", kv_cache="bf16", layers="1: {ff2: bfp8}"),
    ],
    ids=["kv", "activation", "hifi3", "sdpa", "layer_fidelity", "layer_kv", "same_layer"],
)
def test_what_the_target_does_not_honour_does_not_tell_configurations_apart(
    other: PrecisionConfig,
) -> None:
    assert contract(ONE).effective_id == contract(other).effective_id


@pytest.mark.parametrize(
    "other",
    [
        precision_of("bfp4", "hifi4"),
        precision_of("bfp8", "hifi2"),
        precision_of("bfp8", "hifi4", ff2="bfp4"),
        precision_of("bfp8", "hifi4", li_ff2="lofi"),
        precision_of("bfp8", "hifi4", layers="1: {ff2: bfp4}"),
        precision_of("bfp8", "hifi4", layers="1: {li_ff2: lofi}"),
        precision_of("bfp8", "hifi4", block_axis="out"),
        precision_of("bfp8", "hifi4", embedding="fp32"),
    ],
    ids=["bfp4", "int8", "ff2", "li_ff2", "layer_ff2", "layer_li_ff2", "axis", "embedding"],
)
def test_what_changes_numbers_tells_configurations_apart(other: PrecisionConfig) -> None:
    assert contract(ONE).effective_id != contract(other).effective_id


def test_an_axis_does_not_tell_formats_without_blocks_apart() -> None:
    ids = {contract(precision_of("bf16", block_axis=axis)).effective_id for axis in ("in", "out")}
    assert len(ids) == 1


def test_int8_and_exact_differ() -> None:
    precision = precision_of("bfp8", "lofi")
    ids = {contract(precision, compute=compute).effective_id for compute in ("fast", "exact")}
    assert len(ids) == 2


def test_the_id_is_that_of_the_executable() -> None:
    model = tiny_model(num_layers=4)
    executable = compiled(model, "cpu", precision=ONE, compute="fast")
    assert executable.contract.effective_id == contract(ONE).effective_id
    assert executable.contract == contract(ONE)


@pytest.mark.parametrize(
    "changes",
    [
        {"li_ff2_prefill": "lofi", "li_ff2_decode": "hifi4"},
        {"li_qkv_decode": "hifi3"},
    ],
)
def test_phases_that_come_to_different_arithmetic_are_refused(changes: dict[str, str]) -> None:
    precision = precision_of("bfp8", "hifi2", **changes)
    group = next(iter(changes)).rsplit("_", 1)[0]
    with pytest.raises(CompileError, match=rf"model\.layers\.0.*{group} is .* in prefill"):
        compiled(tiny_model(), "cpu", precision=precision, compute="fast")


def test_phases_that_come_to_the_same_arithmetic_are_taken() -> None:
    for precision, compute in (
        (precision_of("bfp8", "hifi2", li_ff2_prefill="lofi", li_ff2_decode="hifi2na"), "fast"),
        (precision_of("bfp8", "hifi4", li_qkv_decode="hifi3"), "fast"),
        (precision_of("bf16", "hifi2", li_qkv_decode="hifi4"), "fast"),
        (precision_of("bfp8", "hifi2", li_qkv_decode="hifi4"), "exact"),
    ):
        compiled(tiny_model(num_layers=1), "cpu", precision=precision, compute=compute).close()


def test_the_reference_emulates_weights_and_computes_in_fp32() -> None:
    found = {e.field: e.meaning for e in contract(precision_of("bfp8"), "reference").entries}
    assert found["ff2 weights"] == Meaning("emulated", "bfp8 values in fp32, blocks along in")
    assert found["li_ff2 decode"] == Meaning("not honoured", "fp32")
    by_axis = {
        contract(precision_of("bfp8", block_axis=axis), "reference").effective_id
        for axis in ("in", "out")
    }
    assert len(by_axis) == 2


def test_the_null_target_honours_nothing() -> None:
    found = contract(precision_of("bfp8"), "null")
    assert {entry.meaning for entry in found.entries} == {Meaning("not honoured", "zeros")}
    assert found.effective_id == contract(precision_of("fp32"), "null").effective_id


def test_a_board_honours_what_it_has_and_says_what_it_refuses() -> None:
    precision = precision_of("bfp8", "lofi", block_axis="out", embedding="bf16", ff2="fp32")
    found = {e.field: e.meaning for e in contract(precision, "n150").entries}
    assert found["wo weights"] == Meaning("honoured", "bfp8 blocks along out")
    assert found["ff2 weights"] == Meaning("not honoured", "refused")
    for field in ("li_ff1_3 prefill", "li_o decode", "sdpa_decode"):
        assert found[field] == Meaning("honoured", "lofi")


def test_a_board_has_a_format_for_values_and_other_targets_use_that_of_keys() -> None:
    apart = precision_of("bfp8", "lofi", block_axis="out", kv_cache="bfp8", v_cache="bfp4")
    equal = precision_of("bfp8", "lofi", block_axis="out", kv_cache="bfp8", v_cache="bfp8")
    of = {e.field: e.meaning for e in contract(apart, "n150").entries}
    assert (of["kv_cache"].effective, of["v_cache"]) == ("bfp8", Meaning("honoured", "bfp4"))
    assert contract(apart, "n150").effective_id != contract(equal, "n150").effective_id
    for target in ("cpu-native", "cuda", "reference"):
        of = {e.field: e.meaning for e in contract(apart, target).entries}
        assert of["v_cache"] == Meaning("not honoured", of["kv_cache"].effective)
        assert contract(apart, target).effective_id == contract(equal, target).effective_id


def test_a_target_is_asked_for_both_phases() -> None:
    """One fidelity may come to different arithmetic in prefill and in decode."""
    same = Meaning("honoured", "")
    meanings = Meanings(
        weight=lambda name, axis: same,
        fidelity=lambda name, axis, fidelity, phase: Meaning(
            "honoured", f"{name} {axis} {fidelity} {phase}"
        ),
        attention=lambda fidelity, phase: Meaning("honoured", f"{fidelity} {phase}"),
        kv_cache=lambda name: same,
        activation=lambda name: same,
    )
    precision = precision_of("bfp8", "hifi2", li_ff2_decode="lofi", sdpa_decode="hifi3")
    graph_module, _ = lowered(tiny_model(), target="reference", precision=precision)
    found = build_contract(graph_module, meanings)
    of = {entry.field: entry.meaning.effective for entry in found.entries}
    assert of["li_ff2 prefill"] == "bfp8 in hifi2 prefill"
    assert of["li_ff2 decode"] == "bfp8 in lofi decode"
    assert of["sdpa_prefill"] == "hifi2 prefill"
    assert of["sdpa_decode"] == "hifi3 decode"
