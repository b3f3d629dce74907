"""Storage reported by a target equals the executable's bytes, summed over a model."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.test_qwen3_5_moe import make as make_hybrid
from tests.models.test_qwen3_moe import make as make_sparse
from tests.tiny import QWEN2, compiled, lowered, precision_of, tiny_model
from tilewright.compiler.formats import FORMATS
from tilewright.compiler.ir.info import CONSTANT, Compute, NodeInfo
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.contract.weight_storage import weight_uses
from tilewright.compiler.targets.cpu.onnxruntime.codes import block_codes, signed_codes
from tilewright.compiler.targets.interface.base import CompileOptions, Target, WeightStorage
from tilewright.compiler.targets.table import get_target
from tilewright.compiler.targets.tenstorrent import BoardTarget
from tilewright.compiler.targets.tenstorrent.program.instructions import tile_bytes
from tilewright.errors import CompileError

RAGGED = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 48, "vocab_size": 131}
BIASED: dict[str, Any] = {
    **QWEN2,
    **RAGGED,
    "tie_embeddings": False,
    "output_bias": True,
    "mlp_bias": True,
}
NOT_WEIGHTS = {"kv_cache": "fp32", "activation": "fp32", "router": "fp32"}
FIRST_LAYER = "0: {ff2: bf16, wqkv: bfp4, wo: q80}"
CONFIGURATIONS = {
    "fp32": precision_of("fp32"),
    "bf16": precision_of("bf16"),
    "blocks in int8": precision_of("bfp8", "hifi2"),
    "blocks in float": precision_of("bfp8", "hifi4"),
    "blocks along out": precision_of("bfp4", "lofi", block_axis="out"),
    "ggml": precision_of("q40", "hifi2", **NOT_WEIGHTS),
    "bf16 table": precision_of("bfp4", "hifi2", embedding="bf16"),
    "mixed": precision_of("bfp8", "hifi2", layers=FIRST_LAYER, li_lm_head="hifi4", ff1_3="bfp2"),
}


def held(
    model: SimpleNamespace, target: str, precision: PrecisionConfig, compute: str
) -> list[WeightStorage]:
    """Return all stored copies for the target's lowered graph."""
    graph_module, _ = lowered(model, target=target, precision=precision)
    copies = {
        (use.recipe, use.storage_by(get_target(target), compute)): use.facts.role
        for use in weight_uses(graph_module)
    }
    return [weight_storage for (_, weight_storage), role in copies.items() if role != CONSTANT]


def ask_for(
    target: str,
    shape: tuple[int, ...],
    form: str,
    *,
    block_axis: str = "in",
    group: str = "ff2",
    compute: str = "fast",
    fidelities: tuple[str, str] = ("lofi", "lofi"),
    block: tuple[tuple[str, tuple[str, str]], ...] = (),
) -> WeightStorage:
    """Return a target's storage for a single weight. ``group`` is empty for vectors."""

    def asked(name: str, phases: tuple[str, str]) -> tuple[WeightRecipe, NodeInfo]:
        recipe = WeightRecipe((Segment("w", shape[0]),), shape, name, block_axis)
        return recipe, NodeInfo(tensor_group=group or None, compute=Compute(*phases))

    others = [asked(*each) for each in block]
    return get_target(target).weight_storage(
        *asked(form, fidelities), compute=compute, block=others
    )


@pytest.mark.parametrize("compute", ["fast", "exact"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("changes", [{}, BIASED], ids=["tied", "untied with biases"])
def test_the_cpu_holds_what_it_says(changes: dict[str, Any], name: str, compute: str) -> None:
    """A tied weight has two copies: for lookups, and transposed for matmuls.

    Rotary tables are not weights.
    """
    model, precision = tiny_model(**changes), CONFIGURATIONS[name]
    executable = compiled(model, "cpu", precision=precision, compute=compute)
    expected = executable.memory().weights
    executable.close()
    assert sum(each.num_bytes for each in held(model, "cpu", precision, compute)) == expected


EXPERTS = {
    "fp32": precision_of("fp32"),
    "bf16": precision_of("bf16"),
    "blocks in int8": precision_of("bfp8", "hifi2"),
    "narrow blocks": precision_of("bfp4", "lofi"),
    "blocks in float": precision_of("bfp8", "hifi4"),
    "ggml": precision_of("q40", "hifi2", **NOT_WEIGHTS | {"router": "bf16"}),
    "by layer": precision_of("bfp8", "hifi2", layers="0: {ff1_3: q80, ff2: q80}"),
}


@pytest.mark.parametrize(
    ("name", "compute"), [*((name, "fast") for name in EXPERTS), ("narrow blocks", "exact")]
)
@pytest.mark.parametrize("make", [make_sparse, make_hybrid])
def test_the_cpu_holds_experts_as_it_says(
    make: Callable[[], SimpleNamespace], name: str, compute: str
) -> None:
    """Their inner channels fill whole blocks. Convolutions and gates are float32."""
    model, precision = make(), EXPERTS[name]
    executable = compiled(model, "cpu", precision=precision, compute=compute)
    expected = executable.memory().weights
    executable.close()
    assert sum(each.num_bytes for each in held(model, "cpu", precision, compute)) == expected


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_reference_holds_float32(name: str) -> None:
    """And rotary frequencies, which are a graph constant."""
    model, precision = tiny_model(**BIASED), CONFIGURATIONS[name]
    found = held(model, "reference", precision, "fast")
    assert {each.kind for each in found} == {"float32"}
    frequencies = 4 * model.config.head_dim // 2
    memory = compiled(model, precision=precision).memory().weights
    assert sum(each.num_bytes for each in found) + frequencies == memory


def test_the_reference_keeps_a_tied_weight_once_where_its_formats_are_equal() -> None:
    model = tiny_model()
    table = 4 * model.config.vocab_size * model.config.hidden_size
    once, twice = (
        sum(each.num_bytes for each in held(model, "reference", precision, "fast"))
        for precision in (precision_of("bfp8"), precision_of("bfp8", lm_head="bf16"))
    )
    assert twice - once == table
    memory = compiled(model, precision=precision_of("bfp8")).memory().weights
    assert once + 4 * model.config.head_dim // 2 == memory


def test_a_board_holds_tiles() -> None:
    """Equal to the program, except padding for banks and rotary frequencies."""
    model = tiny_model(**BIASED)
    precision = precision_of("bfp8", "hifi2", embedding="bf16", wo="bfp4", ff2="bf16")
    found = sum(each.num_bytes for each in held(model, "n150", precision, "fast"))
    graph_module, _ = lowered(model, target="n150", precision=precision)
    target = get_target("n150")
    assert isinstance(target, BoardTarget)
    _, decode = target.programs(graph_module, CompileOptions(max_context=32))
    tiled = {
        weight.name: tile_bytes(weight.format) * -(-weight.rows // 32) * -(-weight.columns // 32)
        for weight in decode.weights
    }
    assert found == sum(tiled.values()) - tiled["model.rotary.inv_freq"]
    assert found < compiled(model, "n150", precision=precision, compute="fast").memory().weights


def test_the_null_target_holds_nothing() -> None:
    found = held(tiny_model(), "null", CONFIGURATIONS["mixed"], "fast")
    assert sum(each.num_bytes for each in found) == 0
    assert compiled(tiny_model(), "null").memory().weights == 0


def ask(target: str, form: str, **changes: Any) -> WeightStorage:
    return ask_for(target, (3, 40), form, **changes)


def test_the_cpu_s_kinds_by_hand() -> None:
    assert ask("cpu", "bfp8") == WeightStorage("bfp8 blocks", 3 * 3 * (16 + 4))
    assert ask("cpu", "bfp4") == WeightStorage("bfp4 blocks", 3 * 3 * (8 + 4))
    assert ask("cpu", "q80") == WeightStorage("q80 blocks", 3 * 2 * (32 + 4))
    assert ask("cpu", "q40") == WeightStorage("q40 blocks", 3 * 2 * (16 + 4))
    dense = WeightStorage("float32", 480, "[in, out]")
    assert ask("cpu", "bfp2") == ask("cpu", "bf16") == dense
    assert ask("cpu", "bfp8", compute="exact") == dense
    assert ask("cpu", "bfp8", block_axis="out") == dense
    assert ask("cpu", "bfp8", fidelities=("hifi3", "hifi4")) == dense
    assert ask("cpu", "bfp8", group="embedding") == WeightStorage("float32", 480)
    for compute in ("fast", "exact"):
        assert ask("cpu", "bf16", group="embedding", compute=compute) == WeightStorage(
            "bfloat16", 240
        )


def test_the_cpu_holds_a_block_of_experts_alike_by_hand() -> None:
    """3 rows with 40 columns: ff2's blocks are along the columns, and ff1_3's rows fill whole
    blocks.
    """

    def out(form: str, *others: str, asked: str = "lofi", **changes: Any) -> WeightStorage:
        block = tuple((other, (asked, asked)) for other in others)
        return ask("cpu", form, group="experts_ff2", block=block, **changes)

    assert (
        out("bfp4", "bfp4", "bfp4") == out("bfp4") == WeightStorage("bfp4 blocks", 3 * 3 * (8 + 4))
    )
    assert out("bfp4", "bfp8", "bfp4") == WeightStorage("8-bit blocks of 16", 3 * 3 * (16 + 4))
    assert out("q40", "q40", "bfp4") == WeightStorage("4-bit blocks of 16", 3 * 3 * (8 + 4))
    assert out("q80", "bfp4", "bfp4") == WeightStorage("8-bit blocks of 16", 3 * 3 * (16 + 4))
    assert out("bfp8", "bfp4", "bfp4") == WeightStorage("bfp8 blocks", 3 * 3 * (16 + 4))
    dense = WeightStorage("float32", 480, "[in, out]")
    assert out("bfp4", "bfp4", "bf16") == out("bfp4", "bfp4", asked="hifi4") == dense
    assert out("bfp4", "bfp8", compute="exact") == out("bfp4", "bfp8", block_axis="out") == dense
    into = {"group": "experts_ff1_3", "block": (("bfp8", ("lofi", "lofi")),)}
    assert ask("cpu", "q40", **into) == WeightStorage("8-bit blocks of 16", 16 * 3 * (16 + 4))


@pytest.mark.parametrize("target", ["reference", "null", "cuda", "n150"])
def test_no_other_target_runs_a_block_as_one(target: str) -> None:
    alone = ask(target, "bfp4", group="experts_ff2")
    others = (("bfp8", ("lofi", "lofi")), ("bf16", ("hifi4", "hifi4")))
    assert ask(target, "bfp4", group="experts_ff2", block=others) == alone


def test_phases_the_cpu_cannot_both_hold_are_refused() -> None:
    with pytest.raises(CompileError, match="ff2 is hifi2 in prefill and hifi4 in decode"):
        ask("cpu", "bfp8", fidelities=("hifi2", "hifi4"))
    assert ask("cpu", "bfp8", fidelities=("hifi2", "hifi4"), compute="exact").kind == "float32"
    assert ask("cpu", "bf16", fidelities=("hifi2", "hifi4")).kind == "float32"


@given(st.sampled_from(["bfp8", "bfp4", "q80", "q40"]), st.integers(1, 9), st.integers(1, 80))
def test_blocks_are_as_many_bytes_as_are_written(name: str, rows: int, columns: int) -> None:
    codes, scales = block_codes(signed_codes(torch.ones(rows, columns), name), name)
    found = ask_for("cpu", (rows, columns), name, group="wo", fidelities=("hifi2", "hifi2"))
    assert found.num_bytes == codes.nbytes + scales.nbytes


@pytest.mark.parametrize("name", FORMATS)
def test_a_target_that_says_nothing_packs_the_format(name: str) -> None:
    """The default of `Target` for device targets."""
    target: Any = None
    for shape, axis in (((5, 48), "in"), ((5, 48), "out"), ((48,), "out")):
        recipe = WeightRecipe((Segment("w", shape[0]),), shape, name, axis)
        found = Target.weight_storage(target, recipe, NodeInfo(tensor_group="wo"), compute="fast")
        at = 0 if axis == "out" and len(shape) == 2 else -1
        assert found == WeightStorage(name, FORMATS[name].nbytes(shape, axis=at))
