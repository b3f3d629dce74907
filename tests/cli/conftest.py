"""A tiny random Llama as a GGUF file and as a Hugging Face folder, for commands to run on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.__main__ import COMMANDS
from bench.__main__ import main as bench
from tests.models.conftest import add_tokenizer, permute, tiny_hf_config, to_gguf_name
from tilewright.cli.main import main

CONTEXT = 1536
"""Enough for token accuracy, not for the long contexts."""


def tiny_llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(1)
    config = tiny_hf_config(max_position_embeddings=CONTEXT, initializer_range=0.2)
    return transformers.LlamaForCausalLM(config)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In F32, with a byte-level vocabulary and a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    model = tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    add_tokenizer(writer)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        values = weight.detach().numpy()
        for part, num_heads in heads.items():
            values = permute(values, num_heads) if part in name else values
        writer.add_tensor(to_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """Config, safetensors and tokenizer.json; without a chat template. Tests may damage it."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    model = tiny_llama()
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weight.detach() for name, weight in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = ["<|start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def board_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """With heads as wide as boards want them, and as many as two chips share."""
    heads = tiny_hf_config(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    transformers.LlamaForCausalLM(heads).save_pretrained(tmp_path / "heads")
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "heads")
    return tmp_path / "heads"


Refused = Callable[..., str]


def main_of(verb: str) -> Callable[[list[str]], int]:
    """``python -m bench`` or ``tilewright``, whichever has the command."""
    return bench if verb in COMMANDS else main


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Where a refused command must have written nothing."""
    return tmp_path / "out" / "results.jsonl"


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], results: Path) -> Refused:
    """Runs ``tilewright bench`` in this process; its only line on standard error, without the name.

    Checks what is true of every user error: exit code 2, one line, nothing printed or written.
    """

    def run(*argv: str, verb: str = "bench") -> str:
        before = set(results.parent.parent.rglob("*"))
        options = ["--results", str(results)] if verb == "bench" else []
        assert main_of(verb)([verb, *options, *argv]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert set(results.parent.parent.rglob("*")) == before, "something was written"
        name, _, message = lines[0].partition(": ")
        assert name == "tilewright" and message
        return message

    return run


@pytest.fixture
def checkpoint(tiny_gguf: Path, tmp_path: Path) -> Path:
    """A copy that a test may remove."""
    return Path(shutil.copy(tiny_gguf, tmp_path / "tiny.gguf"))


Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; its standard output."""

    def succeed(*argv: str | Path) -> str:
        assert main_of(str(argv[0]))([str(argument) for argument in argv]) == 0
        return capfd.readouterr().out

    return succeed
