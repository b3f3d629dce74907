"""A saved tokenizer is the tokenizer: same hash, ids, text, template and ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers
import transformers

from tests.models.test_tokenizer import (
    CHATML,
    CORPUS,
    MESSAGES,
    PIPELINES,
    gguf_metadata,
    sentencepiece_metadata,
    train_byte_level,
)
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.tokenizer.load import load_tokenizer
from tilewright.models.tokenizer.tokenizer import Tokenizer

FILES = {"generation_config.json", "tokenizer.json", "tokenizer_config.json"}
CRLF = CHATML.replace("\n", "\r\n") + "«é»"
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def from_gguf(metadata: dict[str, Any], template: str | None = None) -> Tokenizer:
    more = {} if template is None else {"tokenizer.chat_template": template}
    return load_tokenizer(TokenizerSource(Path("m.gguf"), metadata | more))


def byte_level() -> Tokenizer:
    backend = train_byte_level(*PIPELINES["qwen2"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    return from_gguf(gguf_metadata(backend, "qwen2", eot_token_id=2), CHATML)


def with_first_token() -> Tokenizer:
    metadata = gguf_metadata(train_byte_level(*PIPELINES["llama-bpe"]), "llama-bpe")
    return from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True}, CRLF)


def sentencepiece() -> Tokenizer:
    return from_gguf(sentencepiece_metadata())


def without_prefix() -> Tokenizer:
    return from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False), "")


def without_ends() -> Tokenizer:
    metadata = gguf_metadata(train_byte_level(*PIPELINES["gpt-2"]), "gpt-2")
    del metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.bos_token_id"]
    return from_gguf(metadata)


def hugging_face(folder: Path, **flags: bool) -> Tokenizer:
    backend = train_byte_level(*PIPELINES["smollm"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|endoftext|>", **flags
    )
    saved.chat_template = CHATML
    saved.save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return load_tokenizer(TokenizerSource(folder))


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "with_first_token": with_first_token,
    "sentencepiece": sentencepiece,
    "without_prefix": without_prefix,
    "without_ends": without_ends,
}
KINDS = [
    *MAKERS,
    "folder",
    "folder_with_flags",
    pytest.param("smollm2", marks=pytest.mark.weights),
]


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer, Path]:
    """A tokenizer, what is loaded from where it was saved, and that folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("saved") / "new"
    if request.param == "smollm2":
        from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint

        path = request.getfixturevalue("smollm2_path")
        ours = load_tokenizer(GGUFCheckpoint(path).tokenizer_source)
    elif request.param.startswith("folder"):
        flags = {"add_bos_token": False, "add_eos_token": True}
        ours = hugging_face(source, **(flags if request.param.endswith("flags") else {}))
    else:
        ours = MAKERS[request.param]()
    ours.save(target)
    return ours, load_tokenizer(TokenizerSource(target)), target


Pair = tuple[Tokenizer, Tokenizer, Path]


def check_same(ours: Tokenizer, again: Tokenizer, line: str) -> None:
    for special in (False, True):
        ids = ours.encode(line, add_special=special)
        assert again.encode(line, add_special=special) == ids
        assert again.decode(ids) == ours.decode(ids)
        assert again.decode(ids, skip_special=False) == ours.decode(ids, skip_special=False)
        stream, other = ours.stream(), again.stream()
        assert [other.push(index) for index in ids] == [stream.push(index) for index in ids]


def test_the_same_tokenizer(pair: Pair) -> None:
    ours, again, folder = pair
    assert {file.name for file in folder.iterdir()} == FILES
    assert again.content_hash() == ours.content_hash()
    assert (again.vocab_size, again.bos_id) == (ours.vocab_size, ours.bos_id)
    assert (again.eos_ids, again.special_ids) == (ours.eos_ids, ours.special_ids)
    assert again.has_chat_template == ours.has_chat_template
    if ours.has_chat_template:
        texts = [each.apply_chat_template(MESSAGES, must_read=False) for each in (ours, again)]
        assert texts[0] == texts[1]
    for line in CORPUS:
        check_same(ours, again, line)
    for index in range(ours.vocab_size + 2):
        assert again.token_bytes(index) == ours.token_bytes(index)


@hypothesis.given(line=text)
def test_any_text(line: str, pair: Pair) -> None:
    check_same(pair[0], pair[1], line)


def test_saving_what_was_saved_writes_the_same_files(pair: Pair, tmp_path: Path) -> None:
    _, again, folder = pair
    again.save(tmp_path / "again")
    for name in FILES:
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("kind", ["byte_level", "with_first_token", "folder", "sentencepiece"])
def test_transformers_loads_it_too(kind: str, tmp_path: Path) -> None:
    """But for ``add_bos_token`` and ``add_eos_token``, which it drops beside a tokenizer.json."""
    if kind == "folder":
        (tmp_path / "source").mkdir()
        ours = hugging_face(tmp_path / "source")
    else:
        ours = MAKERS[kind]()
    ours.save(tmp_path / "saved")
    for loader in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        theirs = loader.from_pretrained(tmp_path / "saved")
        assert len(theirs) == ours.vocab_size
        for line in CORPUS:
            ids = ours.encode(line)
            assert theirs.encode(line, add_special_tokens=False) == ids
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
            if kind in ("folder", "byte_level"):
                assert theirs.encode(line) == ours.encode(line, add_special=True)
        if ours.has_chat_template:
            expected = ours.apply_chat_template(MESSAGES)
            prompt = theirs.apply_chat_template(
                MESSAGES, tokenize=False, add_generation_prompt=True
            )
            assert prompt == expected


def refused(tokenizer: Tokenizer, folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        tokenizer.save(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def test_folders_that_are_not_fresh(tmp_path: Path) -> None:
    ours = without_ends()
    (tmp_path / "chat_template.jinja").write_text("stale")
    assert "allowed: a new or empty folder" in refused(ours, tmp_path)
    assert "cannot be written" in refused(ours, tmp_path / "chat_template.jinja")
    assert "cannot be written" in refused(ours, tmp_path / "chat_template.jinja" / "x")
    assert [file.name for file in tmp_path.iterdir()] == ["chat_template.jinja"]
    (tmp_path / "empty").mkdir()
    ours.save(tmp_path / "empty")


@pytest.mark.parametrize("failing", sorted(FILES))
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_no_file(
    error: BaseException, failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text = Path.write_text

    def fail(path: Path, text: str, **options: Any) -> int:
        if path.name == failing:
            write_text(path, text[:10], **options)
            raise error
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises((CheckpointError, KeyboardInterrupt)) as caught:
        without_ends().save(tmp_path / "new")
    assert isinstance(caught.value, CheckpointError) == isinstance(error, OSError)
    assert list((tmp_path / "new").iterdir()) == []
