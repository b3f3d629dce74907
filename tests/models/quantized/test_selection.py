"""Block sizes, group sizes and module lists of a quantization_config, against stored tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.quantized.folders import UP, Tensors, check_refused, check_values, write
from tests.models.quantized.test_float4 import COMPRESSED, MODELOPT, NV
from tests.models.quantized.test_float4 import quantizer as float4
from tests.models.quantized.test_float8 import BF16, BLOCKS, FLOATS, quantizer
from tests.models.quantized.test_integers import (
    awq,
    gptq,
    int8,
    of_awq,
    of_compressed,
    of_gptq,
    packed,
)
from tests.models.quantized.test_packages import DTYPES, MLX, affine
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.checkpoints.quantized.base import RawModel, RawTensor
from tilewright.models.checkpoints.quantized.compressed import read_compressed

NAMES = {**DTYPES, torch.int32: "I32", torch.int64: "I64"}


def groups(**weights: Any) -> dict[str, Any]:
    own = {"num_bits": 8, "type": "float", **weights}
    return {**FLOATS, "config_groups": {"g": {"targets": ["Linear"], "weights": own}}}


def of_weights(**weights: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "group_size": 64, **weights}
    return of_compressed(4, config_groups={"g": {"targets": ["Linear"], "weights": own}})


def dense_up(tensors: Tensors) -> None:
    """Replace a quantized module by a dense module."""
    for name in [name for name in tensors if name.startswith(f"{UP}.")]:
        del tensors[name]
    tensors[f"{UP}.weight"] = torch.ones(192, 128)


@pytest.mark.parametrize("block", [(80, 48), (128, 96)])
def test_partial_blocks_have_the_configured_size(block: tuple[int, int], tmp_path: Path) -> None:
    config = groups(strategy="block", block_structure=list(block))
    check_values(tmp_path / "m", write(tmp_path / "m", quantizer(block, **BF16), config))


def test_float_groups_have_the_configured_size(tmp_path: Path) -> None:
    config = groups(strategy="group", group_size=32)
    check_values(tmp_path / "m", write(tmp_path / "m", quantizer((1, 32), **BF16), config))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("case", ["float", "bytes", "packed"])
def test_a_channel_scale_of_one_output_may_have_one_axis(case: str, shape: tuple[int, ...]) -> None:
    """As of Qwen3.5's gate of the shared expert. compressed-tensors writes two axes."""
    int8s = of_weights(num_bits=8, strategy="channel", group_size=None)
    quantize, config = {
        "float": (quantizer(by_row=True, **BF16), groups(strategy="channel")),
        "bytes": (int8(), int8s),
        "packed": (packed(8, None), int8s),
    }[case]
    for rows in (1, 2):
        weight, rng = np.ones((rows, 128), np.float32), np.random.default_rng(3)
        stored, values = quantize(weight, rng)
        stored["weight_scale"] = stored["weight_scale"][:1].reshape(shape)
        tensors = {f"m.{name}": tensor for name, tensor in stored.items()}
        raw = {n: RawTensor(tuple(t.shape), NAMES[t.dtype], t.nbytes) for n, t in tensors.items()}
        model = RawModel(Path("m"), raw, lambda name, where, own=tensors: own[name][where])  # type: ignore[misc]
        if rows > 1:
            with pytest.raises(CheckpointError, match=r"m\.weight_scale .*; allowed: \[2, 1\]"):
                read_compressed(config, "config.json", model)
            continue
        read_compressed(config, "config.json", model)
        assert np.array_equal(model.found["m.weight"].values(model.read, 0, 1).numpy(), values)


def test_groups_match_names_then_expressions_then_classes(tmp_path: Path) -> None:
    def by_name(weight: np.ndarray, rng: np.random.Generator) -> Any:
        group = 32 if weight.shape == (192, 128) else 64
        return packed(4, group)(weight, rng)

    weights = {"num_bits": 4, "type": "int", "strategy": "group"}
    config = of_compressed(4)
    config["config_groups"] = {
        "a": {"targets": ["Linear"], "weights": {**weights, "group_size": 64}},
        "b": {
            "targets": ["re:.*mlp\\.gate_proj$", UP, "model.layers.0.mlp.up_proj"],
            "weights": {**weights, "group_size": 32},
        },
    }
    check_values(tmp_path / "m", write(tmp_path / "m", by_name, config))


INT4, FP4 = packed(4), float4(COMPRESSED, divides=True)
FP8 = quantizer((128, 128))
MODELOPT4 = float4(("weight", "weight_scale", "weight_scale_2"))
TARGET = {"config_groups": {"g": {"targets": [UP], "weights": {"num_bits": 4, "group_size": 64}}}}
SAME: Callable[[Tensors], None] = lambda _: None  # noqa: E731
DENSE = rf"{UP}\.weight is quantized, but quantization_config\.{{}} has '{{}}.*; allowed: a dense"
LISTED = rf"{UP}\.weight is dense, but quantization_config\.{{}} has '.*'; allowed: a quantized"
REFUSED = [
    *(
        (codes, config, SAME, rf"\[{shape}\] with strategy {name} in .*; allowed: {wanted}")
        for name, wanted, shape, whole in (
            ("tensor", "a number", r"\d+, 1", False),
            ("channel", r"\[\d+, 1\]", "1?", True),
        )
        for codes, config in (
            (quantizer(by_row=not whole, **BF16), groups(strategy=name)),
            (int8(whole=whole), of_weights(num_bits=8, strategy=name, group_size=None)),
        )
    ),
    (
        quantizer((64, 32), **BF16),
        FLOATS,
        SAME,
        r"is a grid \[2, 6\]; allowed: block_structure in ",
    ),
    (quantizer((64, 32), **BF16), groups(strategy="block"), SAME, "block_structure = None"),
    (quantizer((64, 32), **BF16), groups(block_structure="64x32"), SAME, "strategy None; allowed"),
    (
        quantizer((64, 64), **BF16),
        groups(strategy="block", block_structure=[64, 128]),
        SAME,
        r"is BF16 \[2, 3\]; allowed: .*\[2, 2\]",
    ),
    (quantizer((64, 64), **BF16), groups(strategy="block", block_structure=[64]), SAME, "rows and"),
    (
        INT4,
        of_compressed(4, group_size=32),
        SAME,
        r"scale is BF16 \[128, 3\]; allowed: .*\[128, 6\]",
    ),
    (INT4, of_compressed(4, group_size=None), SAME, "has 3 groups; allowed: group_size in "),
    (INT4, of_compressed(4, group_size=40), SAME, "groups of 40 for 192 columns; allowed: equal"),
    (INT4, of_compressed(8), SAME, r"for weight_shape \[128, 192\]; allowed: words of 8 bits"),
    (INT4, {**of_compressed(4), **TARGET}, SAME, "is quantized, but no target names it; allowed"),
    (INT4, of_compressed(4, ignore=["re:.*1.*up"]), SAME, DENSE.format("ignore", "re:.*1.*up")),
    (INT4, of_compressed(4, ignore=["re:(a+)+$"]), SAME, "none of a group"),
    (INT4, of_compressed(4, ignore=["re:" + "(a|ab)" * 5 + "$"]), SAME, "up to 4 groups"),
    (INT4, of_weights(symmetric=False), SAME, "weight_zero_point is missing; allowed"),
    (INT4, of_weights(actorder="group"), SAME, "weight_g_idx is missing; allowed"),
    (INT4, of_weights(symmetric="no"), SAME, "symmetric = 'no'; allowed: true, false"),
    (INT4, of_compressed(4, ignore="lm_head"), SAME, "ignore = 'lm_head'; allowed: a list"),
    (FP4, {**NV, "ignore": [UP]}, SAME, DENSE.format("ignore", UP)),
    (FP8, {**BLOCKS, "modules_to_not_convert": ["up_proj"]}, SAME, "not_convert has 'up_proj'"),
    (FP8, {**BLOCKS, "ignored_layers": [UP]}, SAME, DENSE.format("ignored_layers", UP)),
    (FP8, {**BLOCKS, "modules_to_convert": [UP]}, dense_up, LISTED.format("modules_to_convert")),
    (awq(), of_awq(modules_to_not_convert=["mlp.up_proj"]), SAME, "has 'mlp.up_proj'; allowed"),
    (
        gptq(4),
        of_gptq(4, modules_in_block_to_quantize=[["mlp.up_proj"], ["self_attn.k_proj"]]),
        dense_up,
        LISTED.format("modules_in_block_to_quantize"),
    ),
    (MODELOPT4, {**MODELOPT, "exclude_modules": ["*.mlp.up*"]}, SAME, r"modules has '\*\.mlp\.up"),
    (MODELOPT4, {**MODELOPT, "quantized_layers": {UP: {}}}, dense_up, "quantized_layers has"),
    (affine, {**MLX, UP: False}, SAME, rf"{UP}\.scales is stored, but .* false"),
    (affine, {**MLX, UP: MLX}, dense_up, rf"{UP}\.scales is missing; allowed: a module"),
]


@pytest.mark.parametrize(("quantize", "config", "change", "words"), REFUSED)
def test_contradicting_sizes_and_lists_are_refused_by_name(
    quantize: Any, config: Any, change: Any, words: str, tmp_path: Path
) -> None:
    check_refused(tmp_path / "m", quantize, config, change, words)


@pytest.mark.parametrize(
    "listed", ["mlp.up", "up", "layers.1.mlp.up_pro", "lm_head", "model.layers.11", "re:.*[.]gate$"]
)
def test_lists_match_whole_components(listed: str, tmp_path: Path) -> None:
    write(tmp_path / "m", FP8, {**BLOCKS, "modules_to_not_convert": [listed]})
    assert load_model(tmp_path / "m").checkpoint.stored_type(f"{UP}.weight") == "FP8 128x128"


@pytest.mark.parametrize("listed", [[], [UP], ["model.layers.*.mlp.up_proj"]])
def test_unlisted_dense_modules_are_noted(listed: list[str], tmp_path: Path) -> None:
    change = dense_up
    config = {**BLOCKS, "modules_to_not_convert": listed}
    if listed == ["model.layers.*.mlp.up_proj"]:

        def change(tensors: Tensors) -> None:
            dense_up(tensors)
            for name in [name for name in tensors if name.startswith(UP.replace("1", "0"))]:
                del tensors[name]
            tensors[f"{UP.replace('1', '0')}.weight"] = torch.ones(192, 128)

    write(tmp_path / "m", FP8, config, change=change)
    checkpoint: Any = load_model(tmp_path / "m").checkpoint
    expected = [] if listed else ["1 modules are dense and not listed"]
    notes = checkpoint.notes
    assert len(notes) == len(expected)
    assert all(text in note for text, note in zip(expected, notes, strict=True))


@pytest.mark.parametrize(("quantize", "config"), [(MODELOPT4, MODELOPT), (FP4, NV), (FP8, BLOCKS)])
def test_scales_of_the_cache_are_noted(quantize: Any, config: Any, tmp_path: Path) -> None:
    def with_scales(tensors: Tensors) -> None:
        for name in ("k_scale", "k_proj.k_scale", "v_proj.v_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)

    write(tmp_path / "m", quantize, config, change=with_scales)
    checkpoint: Any = load_model(tmp_path / "m").checkpoint
    (note,) = checkpoint.notes
    assert "3 scales of the KV cache are not used (" in note


def test_mlx_by_method_is_refused_for_other_model_types(tmp_path: Path) -> None:
    write(tmp_path / "m", affine, {**MLX, "quant_method": "mlx"})
    config = json.loads((tmp_path / "m/config.json").read_text())
    load_model(tmp_path / "m")
    (tmp_path / "m/config.json").write_text(json.dumps({**config, "model_type": "olmo3"}))
    with pytest.raises(CheckpointError, match="of MLX for model_type 'olmo3' is not read; allowed"):
        load_model(tmp_path / "m")
