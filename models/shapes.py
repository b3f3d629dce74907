"""Named public shapes, such as ``shape:llama-3.1-8b``: a model's configuration without weights.

The keys are those of the models' own config.json files.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from tilewright.errors import CheckpointError, allowed
from tilewright.models.architectures.table import model_types
from tilewright.models.shape_factors import PHI3_LONG, PHI3_SHORT, PHI35_LONG, PHI35_SHORT
from tilewright.models.vision_shapes import with_towers

if TYPE_CHECKING:
    from tilewright.models.config import ModelConfig

PREFIX = "shape:"
FORM = f"{PREFIX}NAME (random weights of a known shape)"


@dataclass(frozen=True, slots=True)
class ShapeName:
    """A key in `SHAPES`. Its text is the value for ``--model``."""

    name: str

    def __str__(self) -> str:
        return PREFIX + self.name


def _llama3(name: str, *, factor: float, **sizes: object) -> Mapping[str, object]:
    """Return keys common to Llama 3.1 and 3.2. ``factor`` scales the rotation."""
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return MappingProxyType(
        {
            "_name_or_path": name,
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": 128256,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": scaling,
            "tie_word_embeddings": False,
            **sizes,
        }
    )


def _qwen(name: str, model_type: str, **sizes: object) -> Mapping[str, object]:
    """Return keys common to Qwen2.5 and Qwen3."""
    return MappingProxyType(
        {
            "_name_or_path": name,
            "model_type": model_type,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            **sizes,
        }
    )


def _phi3(name: str, short: tuple[float, ...], long: tuple[float, ...]) -> Mapping[str, object]:
    """Return keys common to Phi-3-mini-128k and Phi-3.5-mini, except the factors."""
    return MappingProxyType(
        {
            "_name_or_path": name,
            "model_type": "phi3",
            "hidden_act": "silu",
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": list(short),
                "long_factor": list(long),
            },
            "sliding_window": 262144,
            "tie_word_embeddings": False,
        }
    )


def _hybrid(name: str, *, model_type: str = "qwen3_5_moe", **sizes: object) -> Mapping[str, object]:
    """Return keys common to Qwen3.5, Qwen3.6 and Qwen3.8, for the text model.

    A quarter of the layers have attention, and a quarter of each head's channels rotate.
    """
    return MappingProxyType(
        {
            "_name_or_path": name,
            "model_type": model_type,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "full_attention_interval": 4,
            "attn_output_gate": True,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": False,
            **sizes,
        }
    )


_TEXT_SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "tiny": MappingProxyType(
            {
                "_name_or_path": "Tiny",
                "model_type": "llama",
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "max_position_embeddings": 8192,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
            }
        ),
        "llama-3.2-1b": _llama3(
            "Llama-3.2-1B",
            factor=32.0,
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            head_dim=64,
            tie_word_embeddings=True,
        ),
        "llama-3.2-3b": _llama3(
            "Llama-3.2-3B",
            factor=32.0,
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=28,
            num_attention_heads=24,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        "llama-3.1-8b": _llama3(
            "Llama-3.1-8B",
            factor=8.0,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
        ),
        "llama-3.1-70b": _llama3(
            "Llama-3.1-70B",
            factor=8.0,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
        ),
        "llama-3.2-11b": _llama3(
            "Llama-3.2-11B",
            factor=8.0,
            model_type="mllama",
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=40,
            num_attention_heads=32,
            cross_attention_layers=list(range(3, 40, 5)),
        ),
        "llama-3.2-90b": _llama3(
            "Llama-3.2-90B",
            factor=8.0,
            model_type="mllama",
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=100,
            num_attention_heads=64,
            cross_attention_layers=list(range(3, 100, 5)),
        ),
        "llama-2-70b": MappingProxyType(
            {
                "_name_or_path": "Llama-2-70B",
                "model_type": "llama",
                "hidden_act": "silu",
                "vocab_size": 32000,
                "hidden_size": 8192,
                "intermediate_size": 28672,
                "num_hidden_layers": 80,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
            }
        ),
        "qwen2.5-0.5b": _qwen(
            "Qwen2.5-0.5B",
            "qwen2",
            vocab_size=151936,
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
        ),
        "qwen2.5-7b": _qwen(
            "Qwen2.5-7B",
            "qwen2",
            vocab_size=152064,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
            num_attention_heads=28,
            num_key_value_heads=4,
            max_position_embeddings=131072,
        ),
        "qwen2.5-72b": _qwen(
            "Qwen2.5-72B",
            "qwen2",
            vocab_size=152064,
            hidden_size=8192,
            intermediate_size=29568,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            max_position_embeddings=131072,
        ),
        "phi-3-mini-128k": _phi3("Phi-3-mini-128k", PHI3_SHORT, PHI3_LONG),
        "phi-3.5-mini": _phi3("Phi-3.5-mini", PHI35_SHORT, PHI35_LONG),
        "qwen3-8b": _qwen(
            "Qwen3-8B",
            "qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=40960,
        ),
        "qwen3-30b-a3b": _qwen(
            "Qwen3-30B-A3B",
            "qwen3_moe",
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            max_position_embeddings=40960,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
        "qwen3.5-35b-a3b": _hybrid(
            "Qwen3.5-35B-A3B",
            vocab_size=248320,
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            num_key_value_heads=2,
            head_dim=256,
            max_position_embeddings=262144,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        "qwen3.8-27b": _hybrid(
            "Qwen3.8-27B",
            model_type="qwen3_5",
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_hidden_layers=64,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            max_position_embeddings=262144,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        ),
        "gpt-oss-20b": MappingProxyType(
            {
                "_name_or_path": "gpt-oss-20b",
                "model_type": "gpt_oss",
                "vocab_size": 201088,
                "hidden_size": 2880,
                "intermediate_size": 2880,
                "num_hidden_layers": 24,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "attention_bias": True,
                "num_local_experts": 32,
                "num_experts_per_tok": 4,
                "sliding_window": 128,
                "swiglu_limit": 7.0,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150000.0,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "tie_word_embeddings": False,
            }
        ),
        "tiny-moe": _qwen(
            "Tiny-MoE",
            "qwen3_moe",
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=8192,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        "tiny-hybrid": _hybrid(
            "Tiny-Hybrid",
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=8192,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
    }
)

SHAPES: Mapping[str, Mapping[str, object]] = MappingProxyType(with_towers(_TEXT_SHAPES))
"""config.json keys by shape name. Every model type has an architecture.

Shapes with a tower also have the keys of their image processor.
"""


def shape_names() -> tuple[str, ...]:
    """Return the loadable shapes as values for ``--model``."""
    known = (name for name, values in SHAPES.items() if values["model_type"] in model_types())
    return tuple(PREFIX + name for name in known)


def parse_shape_name(text: str) -> ShapeName | None:
    """Parse ``shape:NAME`` in any case. Return None for a text without this prefix.

    Raises:
        CheckpointError: The shape or its architecture is unknown.
    """
    if not text.lower().startswith(PREFIX):
        return None
    name = text[len(PREFIX) :].lower()
    if name not in SHAPES:
        wrong = reprlib.repr(text[len(PREFIX) :])
        raise CheckpointError(f"{PREFIX} unknown shape {wrong}; {allowed(shape_names(), name)}")
    if SHAPES[name]["model_type"] not in model_types():
        kind = SHAPES[name]["model_type"]
        raise CheckpointError(
            f"{PREFIX}{name}: architecture {kind!r} is not built yet; {allowed(shape_names())}"
        )
    return ShapeName(name)


def shape_config(shape: ShapeName) -> ModelConfig:
    """Return a shape's checked configuration."""
    from tilewright.models.checkpoints.huggingface.config import config_of_hf

    return config_of_hf(SHAPES[shape.name], where=str(shape))
