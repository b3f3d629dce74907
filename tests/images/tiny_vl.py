"""A tiny random Qwen3.5 with its tower, as a folder of transformers with tokenizer and template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.models.test_qwen3_5 import make
from tests.models.test_qwen3_5_moe import delta_keys
from tilewright.models.checkpoints.huggingface.config import hf_values

IMAGE = "<|image_pad|>"
SECTIONS = [3, 3, 2]
SIZE = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
_SPECIAL = ("<|end|>", "<|vision_start|>", "<|vision_end|>", IMAGE)
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_vl(std: float = 0.2) -> Any:
    """transformers' model, with random weights and a layer of each kind."""
    text = replace(make().config, num_layers=2, linear_layers=(True, False))
    values = {**hf_values(text), **delta_keys(text), "vocab_size": 264}
    del values["model_type"]
    values["rope_parameters"] |= {"mrope_section": SECTIONS, "mrope_interleaved": True}
    config = transformers.Qwen3_5Config(
        text_config=values,
        vision_config={
            **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
            **{"out_hidden_size": text.hidden_size, "num_position_embeddings": 16, "patch_size": 4},
        },
        image_token_id=259,
        video_token_id=262,
        vision_start_token_id=257,
        vision_end_token_id=258,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        is_norm = "norm" in name and name.endswith("weight")
        one = float(is_norm and ("visual" in name or "linear_attn" in name))
        torch.nn.init.normal_(weight, mean=one, std=std)
    return model


def save_vl(model: Any, folder: Path) -> Path:
    """Write config, weights, processor, tokenizer and template."""
    processor = {
        **{"size": SIZE, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2},
        **{"image_mean": [0.5] * 3, "image_std": [0.5, 0.4, 0.6]},
    }
    return save_folder(folder, model, model.config.to_dict(), processor, _SPECIAL, _TEMPLATE)


def save_folder(
    folder: Path,
    model: Any,
    config: dict[str, Any],
    processor: dict[str, Any],
    special: Sequence[str],
    template: str,
) -> Path:
    """Write a folder with a tokenizer of bytes and the ``special`` tokens."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.detach().contiguous() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def processor_of_hf() -> Any:
    """transformers' image processor with the folder's settings."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(
        size=SIZE,
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        image_mean=[0.5] * 3,
        image_std=[0.5, 0.4, 0.6],
    )
