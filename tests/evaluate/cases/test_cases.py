"""The named cases, their prompts and texts, and the strict reading of a user's prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import (
    ACCURACY_CONTEXT,
    CASES,
    DEFAULT_CASE,
    PRECISIONS,
    Case,
    check_case,
)
from tilewright.evaluate.cases.prompts import (
    MAX_FILE_BYTES,
    MAX_TEXT_BYTES,
    BenchPrompt,
    accuracy_text,
    bench_text,
    cut_prompts,
    read_prompts,
    sample_prompts,
    sample_prompts_dir,
)
from tilewright.evaluate.results.record import Accuracy

SUFFIXES = (
    *("batch-1", "short", "batch-32", "ci-1", "ci-32", "dp-4", "dp-8", "reasoning", "stress"),
    *("long-context-2k", "long-context-16k", "long-context-32k", "long-context-64k"),
    *("token-matching", "top-1", "eval-repeat", "device-perf"),
)


def complaint(path: Path) -> str:
    """The one-line message that reading `path` ends with."""
    with pytest.raises(ConfigError) as caught:
        read_prompts(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message.splitlines()) == 1
    return message


def written(tmp_path: Path, content: object) -> Path:
    path = tmp_path / "prompts.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_every_case_exists_in_every_precision() -> None:
    assert set(CASES) == {
        f"{precision}-{suffix}" for precision in PRECISIONS for suffix in SUFFIXES
    }
    for name, case in CASES.items():
        assert case.name == name == name.lower()
        assert name.startswith(case.precision + "-")


def test_default_case_answers_one_question() -> None:
    case = CASES[DEFAULT_CASE]
    assert (case.batch_size, case.max_generated_tokens, case.is_natural) == (1, 200, True)


def test_descriptions_tell_cases_apart() -> None:
    descriptions = [case.description for case in CASES.values() if case.precision == "accuracy"]
    assert len(set(descriptions)) == len(SUFFIXES)


def test_unknown_case_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown case 'batch-2'; allowed: .*performance-ci-32"):
        CASES["batch-2"]


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_prompts_of_a_case_exist(case: Case) -> None:
    if case.is_natural:
        assert sample_prompts(case.prompts)
    else:
        assert bench_text(case.prompts)


@pytest.mark.parametrize(
    "field", ["batch_size", "max_generated_tokens", "num_repeats", "data_parallel", "prompt_length"]
)
def test_counts_below_one_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} 0; allowed: 1 or more"):
        replace(CASES["performance-ci-1"], **{field: 0})


def test_top_1_generates_nothing_but_what_it_must() -> None:
    """So it differs from token-matching in what is timed, and not in what accuracy is of."""
    case, whole = CASES["accuracy-top-1"], CASES["accuracy-token-matching"]
    assert (case.max_generated_tokens, case.num_repeats, case.stop_at_eos) == (1, 1, False)
    assert case.token_accuracy and case.prompts == "accuracy.txt"
    assert (case.prompts, case.prompt_length) == (whole.prompts, whole.prompt_length)


def test_requirements() -> None:
    assert CASES["performance-ci-1"].context == 328
    assert CASES["performance-long-context-2k"].context == 2248
    assert CASES["accuracy-token-matching"].context == ACCURACY_CONTEXT
    assert CASES["accuracy-top-1"].context == ACCURACY_CONTEXT
    assert CASES["accuracy-dp-8"].data_parallel == 8
    assert CASES[DEFAULT_CASE].context > 200


def test_a_case_that_does_not_fit_is_refused() -> None:
    check_case(CASES["performance-long-context-2k"], max_context=2248, max_data_parallel=1)
    with pytest.raises(ConfigError, match=r"needs a context of 2248 tokens; allowed .* 2247"):
        check_case(CASES["performance-long-context-2k"], max_context=2247, max_data_parallel=1)
    with pytest.raises(ConfigError, match=r"'performance-dp-4' needs 4 replicas .* 3 or fewer"):
        check_case(CASES["performance-dp-4"], max_context=8192, max_data_parallel=3)


def test_texts_are_long_enough() -> None:
    # A word is at least one token, with any tokenizer in use.
    for name in ("accuracy.txt", "held_out.txt"):
        assert len(bench_text(name).split()) >= ACCURACY_CONTEXT + 1
    assert len(bench_text("long.txt").split()) >= 2048


def test_unknown_sample_or_text_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'riddles.json'; allowed: .*questions.json"):
        sample_prompts("riddles.json")
    with pytest.raises(
        ConfigError, match=r"'../cases.py'; allowed: accuracy.txt, held_out.txt, long.txt"
    ):
        bench_text("../cases.py")


def test_held_out_text_is_another_one() -> None:
    """No sentence of it is in the text that configurations are chosen on, or in the long one."""
    held_out, *others = map(bench_text, ("held_out.txt", "accuracy.txt", "long.txt"))
    assert held_out.isascii()
    sentences = [line.strip() for line in held_out.replace("\n", ". ").split(". ") if line.strip()]
    assert len(sentences) > 60
    assert not any(sentence in text for sentence in sentences for text in others)


def test_accuracy_texts_by_name() -> None:
    standard = accuracy_text()
    assert standard.is_standard and standard == accuracy_text("accuracy")
    assert standard.content == bench_text("accuracy.txt")
    for spelling in ("held-out", "held_out"):
        found = accuracy_text(spelling)
        assert (found.name, found.is_standard) == ("held-out", False)
        assert found.content == bench_text("held_out.txt")


def test_a_user_s_accuracy_text_never_passes_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("accuracy.txt", "accuracy", "held_out", "a | b\n\udcff.txt"):
        path = tmp_path / name
        path.write_text("Grüße", encoding="utf-8")
        found = accuracy_text(f"./{name}")
        assert found.content == "Grüße" and not found.is_standard
        Accuracy.from_counts("r", num_positions=1, num_top1=1, num_top5=1, text=found.name)
        path.write_text("others")
        assert accuracy_text(str(path)).name != found.name
    assert accuracy_text("accuracy").is_standard, "a name is ours, whatever lies beside"


def test_bad_accuracy_texts_are_refused(tmp_path: Path) -> None:
    binary, large = tmp_path / "binary.txt", tmp_path / "large.txt"
    binary.write_bytes(b"a\xff")
    with large.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)
    for path, message in (
        (tmp_path / "none.txt", "No such file"),
        (tmp_path, "Is a directory"),
        ("/dev/zero", "no regular file"),
        ("", "Is a directory"),
        ("a\0b", "null"),
        ("a" * 5000, "too long"),
        (binary, "not valid UTF-8 at byte 1"),
        (large, f"too large; allowed: {MAX_TEXT_BYTES} bytes"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            accuracy_text(str(path))
        assert "allowed: " in str(caught.value) and len(str(caught.value).splitlines()) == 1
        assert repr(str(path))[:100] in str(caught.value)
    with pytest.raises(ConfigError, match="allowed: accuracy, held-out, long, or the path"):
        accuracy_text("held-in")


def test_samples_are_distinct() -> None:
    texts = [prompt.text for prompt in sample_prompts("questions.json")]
    assert len(texts) == len(set(texts)) == 32
    assert len(list(sample_prompts_dir().glob("*.json"))) >= 4


def test_cut_prompts_differ_and_repeat_the_text() -> None:
    assert cut_prompts(range(10), num_prompts=2, prompt_length=3) == [[0, 1, 2], [5, 6, 7]]
    assert cut_prompts(range(3), num_prompts=1, prompt_length=7) == [[0, 1, 2, 0, 1, 2, 0]]
    prompts = cut_prompts(range(2000), num_prompts=32, prompt_length=128)
    assert len({tuple(prompt) for prompt in prompts}) == 32
    assert {len(prompt) for prompt in prompts} == {128}


def test_reading_prompts(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": "Grüße 🙂"}, {"prompt": "b", "max_tokens": 7}])
    assert read_prompts(str(path)) == [BenchPrompt("Grüße 🙂"), BenchPrompt("b", 7)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "Input data was truncated; allowed: a list of objects"),
        ('[{"prompt": "a"}', "Input data was truncated"),
        ("[" * 200_000, "Expected `object`, got `array` - at `$[0]`"),
        (
            '[{"prompt": "a", "max_tokens": ' + "9" * 5000 + "}]",
            "Integer value out of range",
        ),
        ({"prompt": "a"}, "Expected `array`, got `object`; allowed: a list"),
        ([], "Expected `array` of length >= 1"),
        ([{"prompt": "a"}, "b"], "Expected `object`, got `str` - at `$[1]`"),
        ([{}], "missing required field `prompt` - at `$[0]`"),
        ([{"prompt": 3}], "Expected `str`, got `int` - at `$[0].prompt`"),
        ([{"prompt": " \n"}], "matching regex '\\\\S' - at `$[0].prompt`"),
        ([{"prompt": "\ud83d"}], "Input data was truncated"),
        ([{"prompt": "a", "max_token": 3}], "unknown field `max_token` - at `$[0]`"),
        ([{"prompt": "a", "max_tokens": 0}], "Expected `int` >= 1 - at `$[0].max_tokens`"),
        (
            [{"prompt": "a", "max_tokens": True}],
            "got `bool` - at `$[0].max_tokens`",
        ),
        (
            [{"prompt": "a", "max_tokens": None}],
            "got `null` - at `$[0].max_tokens`",
        ),
        (
            [{"prompt": "a", "max_tokens": "x" * 9999}],
            "got `str` - at `$[0].max_tokens`",
        ),
    ],
)
def test_bad_prompts_are_refused(tmp_path: Path, content: object, expected: str) -> None:
    message = complaint(written(tmp_path, content))
    assert expected in message
    assert len(message) < 400 + len(str(tmp_path))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    assert "No such file" in complaint(tmp_path / "none.json")
    assert "Is a directory" in complaint(tmp_path)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b'[{"prompt": "\xff"}]')
    assert "not valid UTF-8 at byte 13" in complaint(binary)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "is too large" in complaint(large)


@given(
    data=st.binary(max_size=64)
    | st.text(alphabet='[]{}":,prompt \\u0', max_size=48).map(str.encode)
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    try:
        prompts = read_prompts(path)
    except ConfigError:
        complaint(path)
    else:
        assert all(prompt.text.strip() for prompt in prompts)


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_valid_prompts_are_read_unchanged(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "valid.json"
    path.write_text(json.dumps([{"prompt": text} for text in texts]), encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(path)] == texts
