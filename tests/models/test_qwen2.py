"""Qwen2 from real files of both containers to text: what transformers makes of the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers

from tests import architecture_checks as checks
from tests.expected_rewrites import expected_rewrites
from tests.models.conftest import to_gguf_name
from tests.models.test_tokenizer import CHATML, PIPELINES, gguf_metadata, train_byte_level
from tests.tiny import QWEN2, precision_of, tiny_model
from tests.twins import assert_eager_equals_twin
from tilewright.compiler.driver import compile_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.errors import CheckpointError
from tilewright.models import load_model
from tilewright.models.architectures.llama import LlamaForCausalLM
from tilewright.models.architectures.qwen2 import Qwen2ForCausalLM
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

PROMPTS = [
    "hello world",
    "the quick brown fox",
    "def f(x):\n    return 12345",
    "数学は cafe\u0301 👍",
]
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """Qwen2's pipeline over a small vocabulary."""
    return train_byte_level(*PIPELINES["qwen2"])


@pytest.fixture
def make(make_qwen2: Callable[..., Any], backend: tokenizers.Tokenizer) -> Callable[..., Any]:
    """transformers' own, with weights large enough that its greedy text varies."""

    def make(**changes: Any) -> Any:
        values: dict[str, Any] = {
            "vocab_size": backend.get_vocab_size(),
            "initializer_range": 0.3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "bos_token_id": None,
            "eos_token_id": 2,
        }
        return make_qwen2(**{**values, **changes}).eval()

    return make


@pytest.fixture
def model(make: Callable[..., Any], backend: tokenizers.Tokenizer) -> Any:
    """With more tokens than the tokenizer knows, as Qwen2.5 has."""
    return make(vocab_size=backend.get_vocab_size() + 4)


@pytest.fixture
def write_vocabulary(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    metadata = gguf_metadata(backend, "qwen2", eos_token_id=2)

    def write(writer: gguf.GGUFWriter) -> None:
        short = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
        spare = [f"[PAD{index}]" for index in range(4)]
        writer.add_tokenizer_model(short["model"])
        writer.add_tokenizer_pre(short["pre"])
        writer.add_token_list([*short["tokens"], *spare])
        writer.add_token_types([*short["token_type"].tolist(), 5, 5, 5, 5])
        writer.add_token_merges(short["merges"])
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHATML)

    return write


def save(model: Any, backend: tokenizers.Tokenizer, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    saved.chat_template = CHATML
    saved.save_pretrained(folder)
    return folder


def greedy(path: Path, target: str = "reference") -> list[str]:
    """Our text for every prompt, in one batch, whichever container ``path`` is."""
    loaded = load_model(path)
    assert loaded.architecture is Qwen2ForCausalLM
    options = CompileOptions(max_batch=4, max_context=128, compute="exact", num_threads=1)
    executable = compile_model(loaded, precision_of(), target=target, options=options).executable
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=loaded.tokenizer.eos_ids)
    requests = [
        RequestState(index, tuple(loaded.tokenizer.encode(prompt)), params)
        for index, prompt in enumerate(PROMPTS)
    ]
    EngineLoop(executable).generate(requests)
    executable.close()
    return [loaded.tokenizer.decode(request.output, skip_special=False) for request in requests]


def their_greedy(model: Any, backend: tokenizers.Tokenizer) -> list[str]:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        with torch.no_grad():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                do_sample=False,
                eos_token_id=2,
                pad_token_id=0,
            )
        texts.append(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=False))
    assert len(set(texts)) == len(PROMPTS)
    return texts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (4, 4)])
def test_eager_logits_and_names_are_transformers(heads: tuple[int, int], tied: bool) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 32 // heads[0]}
    model = tiny_model(std=0.2, tie_embeddings=tied, **sizes, **QWEN2)
    assert_eager_equals_twin(model)


def test_biases_are_what_differs_from_llama() -> None:
    qwen2, llama = tiny_model(**QWEN2).module, tiny_model().module
    assert type(llama) is LlamaForCausalLM and type(qwen2) is Qwen2ForCausalLM
    extra = dict(qwen2.named_parameters()).keys() - dict(llama.named_parameters()).keys()
    parts = {f"self_attn.{letter}_proj.bias" for letter in "qkv"}
    assert {name.split(".", 3)[3] for name in extra} == parts
    assert expected_rewrites(qwen2.config) == expected_rewrites(llama.config)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_greedy_text_of_a_folder(
    target: str,
    shard_size: str,
    tied: bool,
    make: Callable[..., Any],
    backend: tokenizers.Tokenizer,
    tmp_path: Path,
) -> None:
    model = make(tie_word_embeddings=tied)
    folder = save(model, backend, tmp_path / "qwen2", max_shard_size=shard_size)
    num_files = len(list(folder.glob("*.safetensors")))
    assert num_files == 1 if shard_size == "1GB" else num_files > 2
    assert greedy(folder, target) == their_greedy(model, backend)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_greedy_text_of_a_gguf(
    target: str,
    model: Any,
    backend: tokenizers.Tokenizer,
    write_gguf: Callable[..., Path],
    write_vocabulary: Callable[[gguf.GGUFWriter], None],
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "qwen2-f32.gguf", model, tokenizer=write_vocabulary)
    assert greedy(path, target) == their_greedy(model, backend)
    loaded = load_model(path)
    assert loaded.name == "qwen2" and loaded.config.rope.theta == 1e6
    assert loaded.tokenizer.eos_ids == (2,)


def test_both_containers_hold_the_same_model(
    model: Any,
    backend: tokenizers.Tokenizer,
    write_gguf: Callable[..., Path],
    write_vocabulary: Callable[[gguf.GGUFWriter], None],
    tmp_path: Path,
) -> None:
    """GGUF's q and k rows are in Hugging Face's order already, unlike Llama's."""
    folder = load_model(save(model, backend, tmp_path / "qwen2"))
    file = load_model(write_gguf(tmp_path / "qwen2.gguf", model, tokenizer=write_vocabulary))
    assert folder.config == file.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 2)
    assert folder.checkpoint.names.keys() == file.checkpoint.names.keys()
    for name in folder.checkpoint.names:
        assert names.get_name(name, (".weight", ".bias")) == to_gguf_name(name)
        assert torch.equal(folder.checkpoint.get(name), file.checkpoint.get(name)), name
    for prompt in PROMPTS:
        assert folder.tokenizer.encode(prompt) == file.tokenizer.encode(prompt)


def test_a_gguf_without_the_biases_is_refused(
    make_llama: Callable[..., Any], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_llama()
    model.config.model_type = "qwen2"
    path = write_gguf(tmp_path / "qwen2.gguf", model)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias of shape \[64\] is missing"):
        load_model(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not read; allowed: silu"),
    ],
)
def test_what_transformers_writes_and_is_not_read(
    changes: dict[str, Any], words: str, make_qwen2: Callable[..., Any], tmp_path: Path
) -> None:
    make_qwen2(**changes).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", checks.TARGETS)
def test_windows_of_the_upper_layers(target: str, tmp_path: Path) -> None:
    model = tiny_model(std=0.2, windows=(0, 5), **QWEN2)
    checks.check_logits(model, target)
    checks.check_mixed_lengths(model, target)
    checks.check_random_operations(model, target)
    checks.check_folder(model, tmp_path / "tiny")
