"""Reference files: exact round trips, and refused when damaged or of something else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import compiled, prefill, random_tokens, tiny_model
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, ACCURACY_PREFILL
from tilewright.evaluate.cases.reference import (
    AccuracyReference,
    Subject,
    build_reference,
    cached_logits,
    keep_logits,
    load_reference,
    reference_bytes,
    reference_path,
    text_hash,
    text_tokens,
)
from tilewright.utils.files import write_file

SUBJECT = Subject("a model", "m" * 64, "t" * 64, "x" * 64)


def make(**changes: Any) -> AccuracyReference:
    fields: dict[str, Any] = {
        "subject": SUBJECT,
        "prefill": 2,
        "tokens": (1, 2, 3, 4),
        "guesses": ((1, 2, 3, 4, 5), (9, 8, 7, 6, 5)),
        "margins": (0.5, 1.25),
        "versions": {"torch": "2"},
    }
    return AccuracyReference(**{**fields, **changes})


@given(
    margins=st.lists(st.floats(0, 100), max_size=5),
    tokens=st.lists(st.integers(0, 2**31), max_size=5),
    name=st.text(max_size=20),
)
def test_a_file_gives_back_what_was_saved(
    tmp_path_factory: pytest.TempPathFactory, margins: list[float], tokens: list[int], name: str
) -> None:
    path = tmp_path_factory.mktemp("reference") / "deep" / "reference.json"
    subject = dataclasses.replace(SUBJECT, model=name.encode("utf-8", "replace").decode())
    reference = make(margins=tuple(margins), tokens=tuple(tokens), subject=subject)
    write_file(path, reference_bytes(reference))
    assert load_reference(path, subject) == reference
    assert [each.name for each in path.parent.iterdir()] == ["reference.json"]


def test_the_id_is_of_everything_but_the_versions() -> None:
    known = make().id
    assert make(versions={"torch": "3"}).id == known
    for change in (
        {"prefill": 3},
        {"tokens": (1, 2, 3, 5)},
        {"guesses": ((1, 2, 3, 4, 5), (9, 8, 7, 6, 4))},
        {"margins": (0.5, 1.2)},
        {"subject": dataclasses.replace(SUBJECT, model="b")},
    ):
        assert make(**change).id != known


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("model", "model"),
        ("model_hash", "model"),
        ("tokenizer_hash", "tokenizer"),
        ("text_hash", "text"),
    ],
)
def test_a_reference_of_something_else_says_of_what(tmp_path: Path, field: str, said: str) -> None:
    path = tmp_path / "reference.json"
    write_file(path, reference_bytes(make()))
    wanted = dataclasses.replace(SUBJECT, **{field: "other" * 5})
    with pytest.raises(ConfigError) as caught:
        load_reference(path, wanted)
    message = str(caught.value)
    assert f"{path}: the reference is of another {said} (" in message
    assert message.endswith("allowed: otherothe" + "rot") and "\n" not in message


BODY = {"id": make().id, **dataclasses.asdict(make())}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"id"',
        "3",
        "[" * 100_000,
        json.dumps({"id": "x"}),
        json.dumps({**BODY, "more": 1}),
        json.dumps({**BODY, "subject": {"model": "a model"}}),
        json.dumps({**BODY, "subject": 3}),
        json.dumps({**BODY, "guesses": 3}),
        json.dumps({**BODY, "guesses": [3]}),
        json.dumps({key: value for key, value in BODY.items() if key != "tokens"}),
    ],
)
def test_what_is_no_reference_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "reference.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a reference file") as caught:
        load_reference(path, SUBJECT)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_bytes_that_are_no_text_and_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    with pytest.raises(ConfigError, match="not a reference file"):
        load_reference(path, SUBJECT)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not a reference file"):
        load_reference(path, SUBJECT)


@pytest.mark.parametrize(
    "change", [{"prefill": 3}, {"tokens": [1, 2, 3, 5]}, {"margins": [0.5, 1.0]}, {"id": "0" * 12}]
)
def test_a_changed_file_is_damaged(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "reference.json"
    path.write_text(json.dumps({**BODY, **change}))
    with pytest.raises(ConfigError, match="is damaged"):
        load_reference(path, SUBJECT)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "reference.json"
    write_file(path, reference_bytes(make()))
    whole = path.read_bytes()
    for end in range(0, len(whole.rstrip()), 17):
        path.write_bytes(whole[:end])
        with pytest.raises(ConfigError, match="not a reference file"):
            load_reference(path, SUBJECT)


def test_a_text_is_cut_to_the_run_and_no_shorter() -> None:
    assert text_tokens(lambda text: list(range(2000)), "") == list(range(ACCURACY_CONTEXT))
    with pytest.raises(ConfigError, match="has 1023 tokens here; allowed: 1024 or more"):
        text_tokens(lambda text: [1] * (ACCURACY_CONTEXT - 1), "")


def test_hashes_of_texts_differ_where_ids_do() -> None:
    assert text_hash([1, 2]) == text_hash((1, 2))
    assert len({text_hash(ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [258])}) == 5


@pytest.mark.parametrize("name", ["A b/c", "../../x", "SmolLM2-135M", "é", "..."])
def test_names_of_files_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    path = reference_path(name, tmp_path)
    assert path.parent == tmp_path and path.name.endswith(".json")


def test_a_reference_is_built_from_one_prefill() -> None:
    model = tiny_model(max_positions=ACCURACY_CONTEXT, std=0.2)
    executable = compiled(model, max_batch=1, max_context=ACCURACY_CONTEXT)
    tokens = random_tokens(ACCURACY_CONTEXT)
    reference, logits = build_reference(executable, SUBJECT, tokens)
    every = prefill(executable, tokens[:-1])
    expected = every[ACCURACY_PREFILL - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    assert len(reference.guesses) == len(reference.margins) == 512
    assert [row[0] for row in reference.guesses] == logits.argmax(-1).tolist()
    ordered = logits.sort(-1, descending=True)
    assert torch.tensor(reference.guesses).equal(ordered.indices[:, :5])
    margins = ordered.values[:, 0] - ordered.values[:, 1]
    torch.testing.assert_close(torch.tensor(reference.margins), margins, atol=1e-5, rtol=0)
    assert "torch" in reference.versions


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    return tmp_path / "references"


def test_logits_are_kept_and_forgotten_when_cut_short(cache: Path) -> None:
    logits = torch.arange(14.0).view(2, 7)
    assert cached_logits(make()) is None
    assert torch.equal(keep_logits(make(), logits.double()), logits)
    found = cached_logits(make())
    assert found is not None and torch.equal(found, logits)
    assert cached_logits(make(prefill=3)) is None, "another reference has logits of its own"
    (path,) = cache.iterdir()
    for kept in (path.read_bytes()[:-1], b"", b"no array"):
        path.write_bytes(kept)
        assert cached_logits(make()) is None
