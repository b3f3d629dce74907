"""A tiny random Llama 3.2 Vision as a folder with tokenizer and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.images.tiny_vl import save_folder

GATE = 0.7
"""transformers has gates of 0, which hide all images."""
IMAGE_ID = VOCABULARY = 260
MEAN, STD = [0.5, 0.4, 0.6], [0.25, 0.3, 0.28]
_SPECIAL = ("<|end|>", "<|a|>", "<|b|>", "<|c|>", "<|image|>")
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_mllama(*, std: float = 0.15, image_id: int = IMAGE_ID, **text: Any) -> Any:
    """transformers' model. It keeps the outputs of layers 0 and 2: the inputs of 1 and 3.

    ``text``: changes of the text model's configuration.
    """
    torch.manual_seed(0)
    config = transformers.MllamaConfig(
        vision_config={
            **{"hidden_size": 32, "attention_heads": 4, "intermediate_size": 64, "patch_size": 14},
            **{"num_hidden_layers": 4, "num_global_layers": 2, "image_size": 28, "num_channels": 3},
            **{"intermediate_layers_indices": [0, 2], "vision_output_dim": 96, "norm_eps": 1e-5},
        },
        text_config={
            **{"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64},
            **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"cross_attention_layers": [1, 3], "max_position_embeddings": 256},
            **{"bos_token_id": 257, "eos_token_id": 256, "pad_token_id": 258},
            **{"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
            **{"tie_word_embeddings": False, **text},
        },
        image_token_index=image_id,
        attn_implementation="eager",
    )
    model: Any = transformers.MllamaForConditionalGeneration(config).eval()
    for name, weight in model.named_parameters():
        with torch.no_grad():
            weight.normal_(1.0 if "norm" in name and "weight" in name else 0.0, std)
            if "gate" in name.split(".")[-1]:
                weight.fill_(GATE)
    return model


def save_mllama(model: Any, folder: Path) -> Path:
    """Write config, weights, processor, tokenizer and template."""
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["vision_config"]["intermediate_layers_indices"] = [1, 3]
    processor = {
        **{"size": {"height": 28, "width": 28}, "max_image_tiles": 4, "resample": 2},
        **{"image_mean": MEAN, "image_std": STD},
    }
    return save_folder(folder, model, config, processor, _SPECIAL, _TEMPLATE)
