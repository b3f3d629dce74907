"""`tilewright.LLM` on a tiny model: texts, chats, batches, streams, and turns that save work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.models.conftest import add_pieces, make_llama, write_gguf
from tilewright import LLM
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.errors import ConfigError, RequestError, TilewrightError
from tilewright.loading import draft
from tilewright.models.tokenizer.chat_template import Message
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig

__all__ = ["make_llama", "write_gguf"]

HELLO: list[Message] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path) -> Iterator[LLM]:
    with LLM(tiny_gguf, precision="bf16", max_num_seqs=3, use_cache=False) as made:
        yield made


def test_a_text_is_continued_and_a_chat_goes_through_the_template(llm: LLM) -> None:
    plain = llm.generate("hello", max_tokens=4, end_tokens=())
    asked = llm.chat("hello", max_tokens=4, end_tokens=())
    assert plain.num_prompt_tokens == len(llm.tokenizer.encode("hello", add_special=True))
    assert asked.num_prompt_tokens > plain.num_prompt_tokens
    assert llm.chat(HELLO, max_tokens=4, end_tokens=()).tokens == asked.tokens
    for answer in (plain, asked):
        assert len(answer.tokens) == 4 and answer.finish_reason == "length"
        assert str(answer) == answer.text == llm.tokenizer.decode(answer.tokens)
        assert 0 < answer.first_s < answer.total_s and answer.tokens_per_second


def test_generate_of_a_sentencepiece_model_keeps_the_first_space(
    make_llama: Callable[..., Any], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_llama(), tokenizer=add_pieces)
    always = {"logit_bias": {261: 100.0}, "max_tokens": 3}
    with LLM(path, target="null", use_cache=False) as llm:
        answer = llm.generate("ab", **always)
        assert answer.tokens == (261, 261, 261) and answer.text == " a a a"
        assert "".join(llm.stream("ab", **always)) == answer.text
        assert llm.generate("", **always).text == "a a a"


def test_several_run_as_one_batch_and_in_order(llm: LLM) -> None:
    prompts = ["hello", "a b c", "twelve", "the end"]
    sampling = {"max_tokens": 5, "end_tokens": ()}
    together = llm.generate(prompts, **sampling)
    assert [each.tokens for each in together] == [
        llm.generate(prompt, **sampling).tokens for prompt in prompts
    ]
    chats = llm.chat([HELLO, "hello", [*HELLO, {"role": "assistant", "content": "b"}]], **sampling)
    assert chats[0].tokens == chats[1].tokens and len(chats) == 3
    assert llm.generate([]) == []


def test_top_n_sigma_of_a_narrow_range_is_greedy(llm: LLM) -> None:
    greedy = llm.generate("hello", max_tokens=5)
    assert llm.generate("hello", max_tokens=5, temperature=50, seed=3).tokens != greedy.tokens
    narrow = llm.generate("hello", max_tokens=5, temperature=50, seed=3, top_n_sigma=1e-6)
    assert narrow.tokens == greedy.tokens


def test_the_models_own_end_tokens_end_an_answer_unless_others_are_named(llm: LLM) -> None:
    free = llm.generate("hello", max_tokens=6, end_tokens=())
    stopped = llm.generate("hello", max_tokens=6, end_tokens=free.tokens[2:3])
    at = free.tokens.index(free.tokens[2])
    assert (stopped.tokens, stopped.finish_reason) == (free.tokens[: at + 1], "stop")
    assert stopped.text == llm.tokenizer.decode(free.tokens[:at])
    assert llm.chat("x", max_tokens=2, logit_bias={llm.tokenizer.eos_ids[0]: 100}).tokens == (
        llm.tokenizer.eos_ids[0],
    )


def test_an_end_token_of_any_type_is_not_in_the_text(
    make_llama: Callable[..., Any], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """As in responses of the server. A GGUF file may have an end token that is not special."""

    def with_plain_end(writer: gguf.GGUFWriter) -> None:
        add_pieces(writer)
        writer.add_eos_token_id(260)

    path = write_gguf(tmp_path / "m.gguf", make_llama(), tokenizer=with_plain_end)
    ends = {"logit_bias": {260: 100.0}, "max_tokens": 3}
    with LLM(path, target="null", use_cache=False) as llm:
        assert llm.tokenizer.eos_ids == (260,) and 260 not in llm.tokenizer.special_ids
        answer = llm.generate("ab", **ends)
        assert (answer.tokens, answer.finish_reason, answer.text) == ((260,), "stop", "")
        assert list(llm.stream("ab", **ends)) == []
        assert llm.generate("ab", **ends, end_tokens=()).text == "aaa"


def test_a_stream_gives_the_text_piece_by_piece(llm: LLM) -> None:
    whole = llm.chat("hello", max_tokens=12, end_tokens=())
    with llm.stream_chat("hello", max_tokens=12, end_tokens=()) as stream:
        pieces = list(stream)
    assert len(pieces) > 2 and "".join(pieces) == whole.text == stream.answer.text
    assert stream.answer.finish_reason == "length"


def test_streams_run_side_by_side_and_one_left_early_frees_its_slot(llm: LLM) -> None:
    sampling = {"max_tokens": 9, "end_tokens": ()}
    wanted = [llm.generate(text, **sampling).text for text in ("one", "two")]
    one, two = llm.stream("one", **sampling), llm.stream("two", **sampling)
    said = [next(one), next(two)]
    assert ["".join([first, *rest]) for first, rest in zip(said, (one, two), strict=True)] == wanted
    with llm.stream("three", **sampling) as left:
        next(left)
    assert left.answer.finish_reason == "cancelled"
    assert not llm._loop.has_work()
    with llm.stream("three", **sampling):
        pass
    assert not llm._loop.has_work(), "one never begun is not left in the queue"


def test_later_turns_compute_only_what_is_new(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in the steps: of each turn the last reply and the new message, and no more."""
    executable, computed = llm.compiled.executable, list[int]()
    step = executable.step

    def counted(given: Step) -> StepOutput:
        computed[-1] += sum(len(chunk.tokens) for chunk in given.prompts)
        return step(given)

    monkeypatch.setattr(executable, "step", counted)
    chat: list[Message] = []
    before = 0
    for text in ("tell me a long story", "more", "and how does it end"):
        chat.append({"role": "user", "content": text})
        computed.append(0)
        with llm.stream_chat(chat, max_tokens=6) as stream:
            "".join(stream)
        answer = stream.answer
        assert computed[-1] == answer.num_prompt_tokens - answer.num_cached_tokens
        assert before <= answer.num_cached_tokens < answer.num_prompt_tokens
        before = answer.num_prompt_tokens
        chat.append({"role": "assistant", "content": answer.text})


def test_what_cannot_be_asked_is_refused_by_name(llm: LLM, tiny_gguf: Path) -> None:
    with pytest.raises(RequestError, match=r"'temprature'; .*did you mean 'temperature'\?"):
        llm.chat("hello", temprature=1)
    with pytest.raises(RequestError, match="temperature -1; allowed: 0 to 100"):
        llm.generate("hello", temperature=-1)
    with pytest.raises(RequestError, match="of a wrong kind"):
        llm.generate("hello", temperature="hot")
    with pytest.raises(RequestError, match="do not fit the context"):
        llm.generate("hello " * 2000)
    with pytest.raises(RequestError, match="at least one message"):
        llm.chat([])
    with pytest.raises(ConfigError, match="max_model_len 9999; allowed by this model: 1 to 1536"):
        LLM(tiny_gguf, max_context=9999)
    with pytest.raises(ConfigError, match=r"unknown target 'cdua'; .*did you mean 'cuda'\?"):
        LLM(tiny_gguf, target="cdua")


def test_texts_are_embedded_alone_as_in_a_batch(llm: LLM) -> None:
    texts = ["hello", "a b c", "hello"]
    for pooling in ("mean", "last"):
        found = llm.embed(texts, pooling=pooling)
        assert found.shape == (3, llm.compiled.executable.capabilities.hidden_size)
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        np.testing.assert_allclose(found[0], llm.embed("hello", pooling=pooling), atol=1e-5)
        np.testing.assert_allclose(found[0], found[2], atol=1e-5)
    short = llm.embed("hello", dimensions=3)
    assert short.shape == (3,) and np.linalg.norm(short) == pytest.approx(1)
    assert llm.embed([]).shape[0] == 0
    for wrong, said in (
        ({"pooling": "max"}, "pooling 'max'; allowed: mean, last"),
        ({"dimensions": 9999}, "dimensions 9999; allowed: 1 to"),
        ({"texts": ["a", ""]}, "text 1 is empty; allowed"),
        ({"texts": "a " * 5000}, "do not fit the context"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.embed(**{"texts": "a", **wrong})  # type: ignore[arg-type]
    assert llm.generate("hello", max_tokens=2, end_tokens=()).tokens


def test_ranks_are_asked_for_as_by_commands(tiny_gguf: Path) -> None:
    for asked, said in (
        ({"tensor_parallel": 0}, "tensor_parallel_size: '0'; allowed: integers, 1 to 1024"),
        ({"tensor_parallel": 99, "target": "null"}, r"query heads over 99 ranks; allowed: at most"),
        ({"devices": (0,)}, "--devices 0: target cpu has cores"),
    ):
        with pytest.raises(TilewrightError, match=said):
            LLM(tiny_gguf, use_cache=False, **asked)  # type: ignore[arg-type]


@pytest.mark.slow
def test_two_ranks_answer_what_one_device_does(tiny_gguf: Path) -> None:
    found, vectors = [], []
    for count in (1, 2):
        asked = {"precision": "bf16", "compute": "exact", "tensor_parallel": count}
        with LLM(tiny_gguf, backend="native", use_cache=False, **asked) as llm:  # type: ignore[arg-type]
            found.append([each.tokens for each in llm.generate(["hello", "a b"], max_tokens=9)])
            vectors.append(llm.embed(["hello", "a b"]))
    assert found[0] == found[1]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


def test_a_second_one_finds_the_program_in_the_cache(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    stages: list[str] = []
    for _ in range(2):
        stages.clear()
        LLM(tiny_gguf, progress=lambda what, done, total: stages.append(what)).close()
    assert "trace" not in stages and len(list((tmp_path / "programs").glob("*/manifest.json"))) == 1


def test_a_draft_model_with_other_tokens_is_refused(
    tiny_gguf: Path,
    make_llama: Callable[..., Any],
    write_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    how: dict[str, Any] = {"target": "null", "use_cache": False}
    config = '{{"method": "draft_model", "model": "{}", "num_speculative_tokens": 2}}'
    with LLM(tiny_gguf, speculative_config=config.format(tiny_gguf), **how) as llm:
        assert llm.generate("hello", max_tokens=4, end_tokens=()).num_accepted_tokens
    other = write_gguf(tmp_path / "m.gguf", make_llama(), tokenizer=add_pieces)
    with pytest.raises(ConfigError, match="other tokens than those of"):
        LLM(tiny_gguf, speculative_config=config.format(other), **how)


@pytest.mark.slow
def test_a_draft_model_of_two_ranks_is_on_the_leader(tiny_gguf: Path) -> None:
    """Real processes. Drafts change no output."""
    how: dict[str, Any] = {"target": "cpu", "tensor_parallel_size": 2, "num_threads": 1}
    config: dict[str, Any] = {"method": "draft_model", "model": str(tiny_gguf)}
    config["num_speculative_tokens_per_batch_size"] = [[1, 9, 3]]
    answers = []
    for each in (None, json.dumps(config)):
        with LLM(tiny_gguf, speculative_config=each, use_cache=False, **how) as llm:
            answers.append(llm.generate("abcabc", max_tokens=20, end_tokens=()))
    plain, drafted = answers
    assert drafted.tokens == plain.tokens
    assert drafted.num_draft_tokens >= 10 and not plain.num_draft_tokens


def test_a_draft_model_has_its_own_precision(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[ResolvedConfig] = []
    resolve = draft.resolve

    def resolve_and_note(config: EngineConfig, *, runs: bool) -> ResolvedConfig:
        found.append(resolve(config, runs=runs))
        return found[-1]

    monkeypatch.setattr(draft, "resolve", resolve_and_note)
    how: dict[str, Any] = {"target": "null", "use_cache": False, "precision": "bf16"}
    config = {"method": "draft_model", "model": str(tiny_gguf), "draft_precision": "all-bfp4"}
    LLM(tiny_gguf, speculative_config=json.dumps(config), **how).close()
    assert [each.precision and each.precision.name for each in found] == ["all-bfp4"]
    (tmp_path / "manifest.json").write_text("{}")
    config["model"] = str(tmp_path)
    with pytest.raises(ConfigError, match="draft_precision with a compiled folder; allowed: a che"):
        LLM(tiny_gguf, speculative_config=json.dumps(config), **how)
