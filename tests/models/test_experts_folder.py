"""Folders of mixtures of experts and hybrids: experts together or apart, whole models, refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import architecture_checks as checks
from tests.models.test_experts_gguf import KINDS, SPARSE, make
from tests.twins import twin_of
from tilewright.errors import CheckpointError
from tilewright.models.architectures.table import architecture_of
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import ModelConfig
from tilewright.models.sources import stored_shapes


def saved(model: SimpleNamespace, folder: Path, **options: Any) -> Path:
    """As transformers saves it: experts apart."""
    twin_of(model.config, model.checkpoint.tensors).save_pretrained(folder, **options)
    return folder


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "new")
    (folder / "new").rename(folder / "model.safetensors")
    return folder


def together(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every layer's experts in two tensors, an expert's gate above its up."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    blocks = {name.split(".experts.")[0] for name in tensors if ".experts." in name}
    for block in blocks:
        count = sum(name.startswith(f"{block}.experts.") for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors[f"{block}.experts.{e}.{part}_proj.weight"] for e in range(count)])
            for part in ("gate", "up", "down")
        )
        found[f"{block}.experts.gate_up_proj"] = torch.cat((gate, up), dim=1)
        found[f"{block}.experts.down_proj"] = down
    return found


def check(model: SimpleNamespace, folder: Path) -> None:
    found = open_checkpoint(folder)
    assert dataclasses.replace(found.config, name=model.config.name) == model.config
    check_tensors(found, stored_shapes(model.module))
    for name, tensor in model.checkpoint.tensors.items():
        assert torch.equal(found.get(name), tensor), name
        for rows in (slice(1, 3), slice(0, 0)):
            assert torch.equal(found.get(name, rows), tensor[rows]), name
            if tensor.dim() > 1:
                part = found.get(name, rows, slice(8, 24))
                assert torch.equal(part, tensor[rows][..., 8:24]), name
            if tensor.dim() > 2:
                part = found.get(name, (rows, slice(0, 1)), slice(1, 3))
                assert torch.equal(part, tensor[rows, 0:1, ..., 1:3]), name
        assert found.names[name].nbytes == 4 * tensor.numel()


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers(kind: str, tmp_path: Path) -> None:
    checks.check_folder(make(kind), tmp_path / "tiny")


@pytest.mark.parametrize("kind", SPARSE)
def test_experts_of_a_layer_in_one_tensor(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    folder = rewritten(saved(model, tmp_path), together)
    names = load_file(folder / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    check(model, folder)
    assert open_checkpoint(folder).content_hash() == open_checkpoint(folder).content_hash()


@pytest.mark.parametrize("kind", KINDS)
def test_shards(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    folder = saved(model, tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    check(model, folder)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_text_part_of_a_whole_model(kind: str, stacked: bool, tmp_path: Path) -> None:
    """Its tensors lie beside those of the tower for images and of the layer that drafts."""
    model = make(kind)
    folder = saved(model, tmp_path)
    values = json.loads((folder / "config.json").read_text())
    assert values["model_type"] == f"{kind}_text"
    values["rope_parameters"] |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
    values |= {"attn_output_gate": True, "output_gate_type": "swish", "mtp_num_hidden_layers": 1}
    tied = values.pop("tie_word_embeddings")
    whole = {
        **{"model_type": kind, "text_config": values, "tie_word_embeddings": tied},
        "vision_config": {"hidden_act": "gelu", "num_experts": 99},
    }
    (folder / "config.json").write_text(json.dumps(whole))

    def inside(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors = together(tensors) if stacked else tensors
        moved = {
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name: tensor
            for name, tensor in tensors.items()
        }
        others = {
            "model.visual.blocks.0.norm.weight": torch.ones(3),
            "mtp.fc.weight": torch.ones(3),
        }
        return {**moved, **others}

    check(model, rewritten(folder, inside))


FP8, EXL3 = {"quant_method": "fp8"}, {"quant_method": "exl3"}
WORD = "quantization_config"


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not read; allowed: silu"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 .* from 1 to 6"),
        ("qwen3_moe", {"num_experts": 5}, "num_local_experts = 6 is not read; allowed: as num_ex"),
        ("qwen3_moe", {"mlp_only_layers": [9]}, r"mlp_only_layers = \[9\] .*layers from 0 to 1"),
        ("qwen3_moe", {"mlp_only_layers": True}, "mlp_only_layers = True .*a list of layers"),
        ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers = 0 is not read; .*a list of lay"),
        ("qwen3_moe", {"mlp_only_layers": False}, "mlp_only_layers = False .*a list of layers"),
        ("qwen3_next", {"mlp_only_layers": ""}, "mlp_only_layers = '' .*a list of layers"),
        ("qwen3_5_moe", {"mlp_only_layers": {}}, r"mlp_only_layers = \{\} .*a list of layers"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 is not read"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1 is not read; allowed: true, fals"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid' .*: softmax"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor = 2.5 is not read"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts = 1 is not read; allowed: 0"),
        ("qwen3_moe", {"rope_scaling": {"rope_type": "ntk"}}, "rope_scaling = .*ntk"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "heads = 3 .*: a multiple of the 2 key heads"),
        ("qwen3_5", {"layer_types": ["full_attention"]}, "allowed: 4 of full_attention, linear_"),
        ("qwen3_5", {"layer_types": ["mamba"] * 4}, "layer_types = 'mamba' is not read; allowed"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate = False .*; allowed: true"),
        ("qwen3_5", {"output_gate_type": "sigmoid"}, "gate_type = 'sigmoid' .*; allowed: \"swish"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim = 1 .* from 2 to 64"),
        ("qwen3_5_moe", {WORD: EXL3}, "quant_method = 'exl3' is not read"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False .*; allowed: true$"),
        ("qwen3_5_moe", {"num_experts_per_tok": 99}, "num_experts_per_tok = 99 is not read"),
        ("qwen3_next", {"hidden_act": "relu2"}, "hidden_act = 'relu2' is not read; allowed: silu"),
    ],
)
def test_what_would_change_the_arithmetic_is_refused_by_name(
    kind: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    values = {**config_of(kind), **changes}
    wholes = [values]
    if architecture_of(kind).text_config:
        wholes.append({"model_type": kind, "text_config": values})
    for whole in wholes:
        with pytest.raises(CheckpointError, match=words) as caught:
            config_of_hf(whole, where=tmp_path / "config.json")
        assert "\n" not in str(caught.value)


TIED = "tie_word_embeddings"


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize(
    ("outside", "inside", "words"),
    [
        (
            {WORD: EXL3},
            {},
            r": quantization_config\.quant_method = 'exl3' is not read; allowed: auto-round",
        ),
        ({WORD: EXL3}, {WORD: None}, r": quantization_config\.quant_method = 'exl3' is not read"),
        ({}, {WORD: EXL3}, r": text_config\.quantization_config\.quant_method = 'exl3' is not"),
        ({WORD: None}, {WORD: EXL3}, r": text_config\.quantization_config\.quant_method = 'exl3'"),
        ({WORD: {}}, {}, r": quantization_config\.quant_method = None is not read"),
        ({WORD: FP8}, {WORD: {**FP8, "fmt": "e4m3"}}, "config differs from text_config"),
        ({}, {"model_type": "qwen3_next"}, r"text_config\.model_type = 'qwen3_next' .*KIND_text$"),
        ({}, {"model_type": "KIND_text_text"}, r"text_config\.model_type = .*: KIND, KIND_text$"),
        ({}, {"model_type": 3}, r"text_config\.model_type = 3 is not read; allowed: KIND, "),
        ({TIED: True}, {TIED: False}, r"text_config\.tie_word_embeddings = False .*: true, as out"),
        ({TIED: False}, {TIED: True}, r"text_config\.tie_word_embeddings = True .*: false, as ou"),
        ({TIED: 1}, {TIED: True}, ": tie_word_embeddings = 1 is not read; allowed: true, false"),
    ],
)
def test_a_whole_and_its_text_part_have_to_agree(
    kind: str, outside: dict[str, Any], inside: dict[str, Any], words: str, tmp_path: Path
) -> None:
    inside = {key: _named(value, kind) for key, value in inside.items()}
    with pytest.raises(CheckpointError, match=_named(words, kind)) as caught:
        _whole(kind, outside, inside, tmp_path)
    assert "\n" not in str(caught.value)


def _named(value: Any, kind: str) -> Any:
    return value.replace("KIND", kind) if isinstance(value, str) else value


def _whole(kind: str, outside: object, inside: object, folder: Path) -> ModelConfig:
    values = config_of(kind)
    del values[TIED]
    whole = {"model_type": kind, "text_config": values | inside} | outside  # type: ignore[operator]
    return config_of_hf(whole, where=folder / "config.json")


@pytest.mark.parametrize("tied", [True, False])
def test_what_either_says_alone_holds(tied: bool, tmp_path: Path) -> None:
    for kind in ("qwen3_5", "qwen3_5_moe"):
        said: dict[str, Any] = {TIED: tied}
        for outside, inside in (
            (said, {}),
            (said, {TIED: None}),
            ({}, said),
            ({TIED: None}, said),
            (said, {**said, "model_type": kind}),
            ({**said, WORD: None}, {WORD: None, "model_type": f"{kind}_text"}),
            (said, {"model_type": None}),
        ):
            assert _whole(kind, outside, inside, tmp_path).tie_embeddings is tied


@pytest.mark.parametrize(
    ("kind", "said"), [("qwen3_moe", False), ("qwen3_next", False), ("qwen3_5_moe", True)]
)
def test_weights_of_experts_add_up_where_transformers_has_them_so(
    kind: str, said: bool, tmp_path: Path
) -> None:
    values = {**config_of(kind), "norm_topk_prob": said}
    found: Any = config_of_hf(values, where=tmp_path / "config.json")
    assert found.renormalise is said
    del values["norm_topk_prob"]
    found = config_of_hf(values, where=tmp_path / "config.json")
    assert found.renormalise is (kind != "qwen3_moe")


@pytest.mark.parametrize("layers", [None, [], [1]])
def test_layers_with_a_dense_block(layers: list[int] | None, tmp_path: Path) -> None:
    values = {**config_of("qwen3_moe"), "mlp_only_layers": layers}
    found: Any = config_of_hf(values, where=tmp_path / "config.json")
    assert found.dense_layers == tuple(layers or ())


@pytest.mark.parametrize(
    "section", [[11, 11], [11, 11, -1], [11, 11, "10"], "11", [1.0, 1.0, 1.0], [True] * 3]
)
def test_sections_of_a_wrong_kind(section: object, tmp_path: Path) -> None:
    values = config_of("qwen3_5_moe")
    values["rope_parameters"] = {**values["rope_parameters"], "mrope_section": section}
    with pytest.raises(CheckpointError, match=r"rope_parameters\.mrope_section = .*whole numbers"):
        config_of_hf(values, where=tmp_path / "config.json")


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_nothing_is_not_refused(kind: str, tmp_path: Path) -> None:
    values = config_of(kind)
    harmless = {
        **{"attention_dropout": 0.1, "output_router_logits": True, "router_aux_loss_coef": 0.1},
        **{"use_cache": False, "initializer_range": 1.0, "routed_scaling_factor": 1.0},
    }
    found = config_of_hf({**values, **harmless}, where=tmp_path / "config.json")
    assert found == config_of_hf(values, where=tmp_path / "config.json")


def config_of(kind: str) -> dict[str, Any]:
    model = make(kind)
    values: dict[str, Any] = twin_of(model.config).config.to_dict()
    return json.loads(json.dumps(values))  # type: ignore[no-any-return]


UP = "model.layers.1.mlp.experts.3.up_proj.weight"
BOTH = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("kind", SPARSE)
def test_an_expert_that_does_not_fit_is_named_with_its_shape(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    saved(model, tmp_path)

    def refused(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> str:
        kept = (tmp_path / "model.safetensors").read_bytes()
        with pytest.raises(CheckpointError) as caught:
            check_tensors(open_checkpoint(rewritten(tmp_path, change)), stored_shapes(model.module))
        (tmp_path / "model.safetensors").write_bytes(kept)
        return str(caught.value)

    missing = refused(lambda found: {n: t for n, t in found.items() if n != UP})
    assert f"tensor {UP} of shape [24, 32] is missing" in missing
    wrong = refused(lambda found: {**found, UP: torch.zeros(23, 32)})
    assert f"tensor {UP} has shape [23, 32]; allowed: [24, 32], by" in wrong
    extra = refused(lambda found: {**found, UP.replace(".3.", ".6."): torch.zeros(24, 32)})
    assert f"tensor {UP.replace('.3.', '.6.')} of shape [24, 32] is not part of" in extra
    missing = refused(lambda found: {n: t for n, t in together(found).items() if n != BOTH})
    assert f"tensor {BOTH} of shape [6, 48, 32] is missing" in missing
    wrong = refused(lambda found: {**together(found), BOTH: torch.zeros(6, 47, 32)})
    assert f"tensor {BOTH} has shape [6, 47, 32]; allowed: [6, 48, 32], by" in wrong
    twice = refused(lambda found: {**together(found), UP: found[UP]})
    assert f"tensor {UP}" in twice and (
        "is not part of" in twice or "stored stacked and sep" in twice
    )
