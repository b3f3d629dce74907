"""Ids, text, streams and chat prompts against transformers, for folders and GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from tilewright.errors import CheckpointError, RequestError
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer

CORPUS = [
    "",
    " ",
    "Hello world",
    "  two  spaces   three ",
    "\n\n\tdef f(x: int) -> int:\n    return x ** 2  # 12345 + 0x1F\r\n",
    "line\r\rline\x0b\x0c\x85\u2028\u2029\u00a0nbsp\u3000wide\u200b\ufeff.",
    "I'll say it's 3.14159, they've 1,000,000; 2024-10-31!",
    "I'LL SAY IT'S",
    "数学は楽しい。我喜欢机器学习，２０２４年。한국어 문장입니다.",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪 emoji 😀😀😀",
    "café cafe\u0301 naïve ﬁ Ⅷ ² ½",
    "Привет, мир! ١٢٣ مرحبا שלום हिन्दी",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> < |im_end|>",
    "<think>why</think>   <think>",
    "a" * 300 + "!" * 50,
    "\x00\x01\x7f control",
    "\ufffd replacement \ufffd\ufffd",
    'https://example.org/a?b=c&d=%20#e {"k": [1, 2.5e-10, null]}',
]
TRAINING = [
    *CORPUS,
    "the quick brown fox jumps over the lazy dog " * 3,
    "1234567890 hello help held",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}\n  {{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "You are «exact»."},
    {"role": "user", "content": "<b>1 < 2</b> & 👍\n"},
]
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def train_byte_level(pre: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TRAINING, trainer)
    return backend


def split_pre_tokenizer(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def gguf_metadata(backend: tokenizers.Tokenizer, pre: str | None, **more: Any) -> dict[str, Any]:
    """The keys a converter would write for a byte-level tokenizer."""
    model = json.loads(backend.to_str())["model"]
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    added = backend.get_added_tokens_decoder()
    types = [3 if index in added and added[index].special else 1 for index in range(len(tokens))]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": np.array(
            [4 if index in added and kind == 1 else kind for index, kind in enumerate(types)],
            np.int32,
        ),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **({} if pre is None else {"pre": pre}),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def check_same(ours: Tokenizer, theirs: Any, texts: list[str]) -> None:
    for line in texts:
        ids = theirs.encode(line, add_special_tokens=False)
        assert ours.encode(line) == ids, line
        for skip in (True, False):
            expected = theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert ours.decode(ids, skip_special=skip) == expected
            stream = ours.stream(skip_special=skip)
            assert "".join([stream.push(index) for index in ids] + [stream.flush()]) == expected


# The pipelines as the models' own tokenizer.json files spell them.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
PIPELINES = {
    "smollm": (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
        None,
    ),
    "gpt-2": (BYTE_LEVEL, None),
    "default": (BYTE_LEVEL, None),
    None: (BYTE_LEVEL, None),
    "llama-bpe": (split_pre_tokenizer(LLAMA3_SPLIT), None),
    "qwen2": (split_pre_tokenizer(QWEN2_SPLIT), normalizers.NFC()),
}


@pytest.mark.parametrize("pre", PIPELINES)
def test_gguf_byte_level_equals_transformers(pre: str | None) -> None:
    backend = train_byte_level(*PIPELINES[pre])
    backend.add_tokens([AddedToken("<think>", normalized=False)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    ours = load_tokenizer(TokenizerSource(Path("m.gguf"), gguf_metadata(backend, pre)))
    assert ours.vocab_size == backend.get_vocab_size()
    check_same(ours, theirs, CORPUS)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> tuple[Tokenizer, Any]:
    """Ours, and transformers around the pipeline of SmolLM2's own tokenizer.json."""
    from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint

    source = GGUFCheckpoint(smollm2_path).tokenizer_source
    metadata: Any = source.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = PIPELINES["smollm"][0]
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tokens[:17])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.chat_template = metadata["tokenizer.chat_template"]
    return load_tokenizer(source), theirs


@pytest.mark.weights
def test_smollm2_ids_and_chat(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    check_same(ours, theirs, [*CORPUS, "\n".join(CORPUS)])
    assert ours.encode("Hello 123") == [19556, 216, 33, 34, 35]
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49152, 1, (2,))
    for messages in (MESSAGES, MESSAGES[1:]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected
    assert ours.encode("<|im_end|>") == [2] and ours.encode("hi", add_special=True) == ours.encode(
        "hi"
    )


@pytest.mark.weights
@hypothesis.given(line=text)
def test_smollm2_any_text(line: str, smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    check_same(ours, theirs, [line])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    backend = train_byte_level(BYTE_LEVEL)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|endoftext|>"
    )
    saved.chat_template = CHATML
    saved.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (path / "config.json").write_text('{"eos_token_id": 0}')
    return path


def test_folder_equals_auto_tokenizer(folder: Path) -> None:
    ours = load_tokenizer(TokenizerSource(folder))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    check_same(ours, theirs, CORPUS)
    for line in CORPUS:
        assert ours.encode(line, add_special=True) == theirs.encode(line)
    assert ours.encode("a", add_special=True)[0] == 1
    assert (ours.bos_id, ours.eos_ids) == (1, (0, 2))
    assert ours.vocab_size == len(theirs)
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(MESSAGES) == expected
    assert expected.endswith("<|im_start|>assistant\n")


def copy_folder(folder: Path, target: Path) -> Path:
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_template_in_the_configuration_and_flags(folder: Path, tmp_path: Path) -> None:
    copy_folder(folder, tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]
    config.update(chat_template=named, add_bos_token=False, add_eos_token=True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(TokenizerSource(tmp_path))
    assert ours.apply_chat_template(MESSAGES).endswith("<|im_start|>assistant\n")
    assert ours.encode("a", add_special=True) == [*ours.encode("a"), 0]
    assert ours.content_hash() != load_tokenizer(TokenizerSource(folder)).content_hash()


def test_content_hash_is_stable(folder: Path) -> None:
    first = load_tokenizer(TokenizerSource(folder)).content_hash()
    assert first == load_tokenizer(TokenizerSource(folder)).content_hash()
    assert len(first) == 64


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, r"tokenizer\.json: the tokenizer is missing"),
        ("tokenizer.json", "{}", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", "[1", r"tokenizer\.json: not JSON"),
        ("tokenizer_config.json", "[]", r"has a list; allowed: a JSON object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}', "added_tokens_decoder"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"7": {"content": "<new>"}}}',
            "'<new>' has id 7; tokenizer.json makes it",
        ),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id = '2'"),
        ("chat_template.jinja", "{% for %}", "chat template: .*Expected"),
    ],
)
def test_bad_folders(
    name: str, content: str | None, words: str, folder: Path, tmp_path: Path
) -> None:
    copy_folder(folder, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(TokenizerSource(tmp_path))
    assert "\n" not in str(caught.value)


def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Llama 2's layout: unknown, two control tokens, 256 bytes, then pieces best first."""
    words = [
        "▁▁",
        "▁t",
        "he",
        "▁the",
        "er",
        "in",
        "▁h",
        "ll",
        "▁he",
        "▁hell",
        "ello",
        "▁hello",
        "lo",
    ]
    words += ["▁▁▁▁", "123", "12", "23", "▁w", "or", "▁wor", "ld", "▁world", "数学", "é"]
    letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz,.!?'HI0123456789数学é"))
    pieces = [word for word in words if len(word) > 1] + letters
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *pieces,
        "<tool>",
    ]
    scores = [0.0] * 259 + [-float(place) for place in range(len(pieces))] + [0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4]
    return tokens, scores, types


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocabulary()
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_transformers(prefix: bool) -> None:
    from transformers.tokenization_utils_base import generate_merges

    tokens, scores, _ = sentencepiece_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)))
    theirs = transformers.LlamaTokenizerFast(vocab=vocab, merges=merges, add_prefix_space=prefix)
    theirs.add_tokens([AddedToken("<tool>", normalized=False)])
    metadata = sentencepiece_metadata(add_space_prefix=prefix)
    ours = load_tokenizer(TokenizerSource(Path("m.gguf"), metadata))
    lines = [*CORPUS, "hello world", " hello</s> the", "a<tool> b", "the 123数学\n\thello"]
    check_same(ours, theirs, lines)
    assert ours.encode("hello", add_special=True) == [1, *ours.encode("hello")]
    assert len(ours.encode("hello")) == (1 if prefix else 3)
    assert ours.eos_ids == (2,)


@pytest.fixture(scope="module")
def byte_level(folder: Path) -> Tokenizer:
    return load_tokenizer(TokenizerSource(folder))


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    return load_tokenizer(TokenizerSource(Path("m.gguf"), sentencepiece_metadata()))


def test_ids_may_be_any_kind_of_whole_number(byte_level: Tokenizer) -> None:
    ids = np.array(byte_level.encode("hello"))
    assert byte_level.decode(ids) == "hello"  # type: ignore[arg-type]


@pytest.mark.parametrize("line", ["\ud800", "ok \udfff end"])
def test_lone_surrogates(line: str, byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D"):
        byte_level.encode(line)


@pytest.mark.parametrize("index", [-1, 1 << 40, 1.5, True, "1"])
def test_bad_ids(index: Any, byte_level: Tokenizer) -> None:
    with pytest.raises(RequestError, match="allowed: 0 to"):
        byte_level.decode([index])
    with pytest.raises(RequestError, match="allowed: 0 to"):
        byte_level.stream().push(index)


def test_chats_that_cannot_be_rendered(byte_level: Tokenizer, pieces: Tokenizer) -> None:
    with pytest.raises(RequestError, match="at least one message"):
        byte_level.apply_chat_template([])
    with pytest.raises(RequestError, match="holds a object"):
        byte_level.apply_chat_template([{"role": "user", "content": object()}])
    assert not pieces.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        pieces.apply_chat_template(MESSAGES)


def test_a_decoder_without_bytes_is_refused(folder: Path, tmp_path: Path) -> None:
    copy_folder(folder, tmp_path)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    with pytest.raises(CheckpointError, match="decoder WordPiece is not read; allowed: ByteLevel"):
        load_tokenizer(TokenizerSource(tmp_path))
