"""A tiny random Gemma 3 with SigLIP as a folder with tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.images.tiny_vl import save_folder

SIDE, IMAGE_ID = 56, 258
MARKER, PLACEHOLDER, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
_SPECIAL = ("<|end|>", MARKER, PLACEHOLDER, END)
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PROCESSOR: dict[str, Any] = {
    **{"size": {"height": SIDE, "width": SIDE}, "resample": 2, "do_pan_and_scan": None},
    **{"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.4, 0.6]},
}


def tiny_gemma(*, window: int = 24, std: float = 0.15) -> Any:
    """transformers' model with 16 tokens per image, and a window in the first of two layers."""
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config={
            **{"vocab_size": 264, "hidden_size": 48, "intermediate_size": 64, "head_dim": 16},
            **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 256, "sliding_window": window},
            **{"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
        },
        vision_config={
            **{"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64},
            **{"num_hidden_layers": 2, "image_size": SIDE, "patch_size": 7},
        },
        **{"mm_tokens_per_image": 16, "image_token_index": IMAGE_ID},
        **{"boi_token_index": 257, "eoi_token_index": 259},
        attn_implementation="eager",
    )
    model: Any = transformers.Gemma3ForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        is_one = "vision_tower" in name and "norm" in name and name.endswith("weight")
        torch.nn.init.normal_(weight, mean=float(is_one), std=std)
    return model


def save_gemma(model: Any, folder: Path) -> Path:
    """Write config, weights, processor, tokenizer and template."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    return save_folder(folder, model, config, PROCESSOR, _SPECIAL, _TEMPLATE)
