"""Muse-Glimmer's text model: norms without weights, gated attention and capped logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin, twin_of
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.sources import stored_shapes

ON_CUDA: dict[str, Any] = {"num_layers": 2, "second_layers": (1,), "windows": (4, 0)}
SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {
        **{"num_layers": 5, "second_layers": (0, 4), "windows": (0, 5, 5, 5, 0)},
        "tie_embeddings": False,
    },
    "factors": {
        **{"second_layers": (1,), "windows": (0, 3), "query_factor": 1.7, "logit_cap": 2.0},
        **{"post_norm_eps": 1e-3, "logit_factor": 0.7, "norm_eps": 1e-3},
    },
}


def _changes(config: Any) -> dict[str, Any]:
    layers = range(config.num_layers)
    return {
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in config.windows
        ],
        "sliding_window": max(config.windows),
        "layer_rope_theta": [
            0 if layer in config.second_layers else config.rope.theta for layer in layers
        ],
        "post_norm_eps": config.post_norm_eps,
        "qk_scale_factor": config.query_factor,
        "output_multiplier": config.logit_factor,
        "final_logit_softcapping": config.logit_cap,
        "attention_bias": config.attention_bias,
        "pad_token_id": 0,
    }


class TextModel(nn.Module):
    """transformers' text model, with the head of the multimodal model."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.model = transformers.MuseGlimmerTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Any:
        logits = self.lm_head(self.model(tokens).last_hidden_state)
        cap = self.config.final_logit_softcapping
        logits = torch.tanh(logits * self.config.output_multiplier / cap) * cap
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


TWIN = Twin(transformers.MuseGlimmerTextConfig, TextModel, _changes)


def make(shape: str = "as_published") -> Any:
    return tiny_model(std=0.2, model_type="muse_glimmer", **SHAPES[shape])


NOT_READ: checks.NotRead = [
    ({"layer_rope_theta": [0, 5.0, 0, 0, 0]}, "layer_rope_theta.*5 of 0, 10000"),
    ({"layer_types": ["full_attention"]}, "layer_types.*5 of full_attention"),
    ({"hidden_activation": "gelu"}, "hidden_activation = 'gelu'"),
    ({"final_logit_softcapping": 0}, "final_logit_softcapping = 0"),
]


def test_a_multimodal_folder_has_the_text_model(tmp_path: Path) -> None:
    """The folder of transformers' own multimodal class."""
    model = make()
    text = twin_of(model.config).config.to_dict()
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    vision |= {"num_attention_heads": 2, "pos_emb_height": 4, "pos_emb_width": 4}
    sizes = {"out_hidden_size": 64, "projector_hidden_size": 8}
    config = transformers.MuseGlimmerConfig(text_config=text, vision_config=vision, **sizes)
    theirs = transformers.MuseGlimmerForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    check_tensors(checkpoint, stored_shapes(model.module))
    tokens = torch.arange(9)[None]
    model.checkpoint.tensors.update({name: checkpoint.get(name) for name in checkpoint.names})
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens).logits[0]
    checks.assert_near(checks.their_logits(model, list(range(9))), expected)
