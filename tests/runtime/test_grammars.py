"""Structured output: for any logits, an answer obeys its grammar or is cut short."""

from __future__ import annotations

import functools
import json
import re
import threading
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.random_logits import (
    END,
    NUM_TOKENS,
    THINK,
    UNTHINK,
    VOCAB,
    RandomLogits,
    grammars,
    text_of,
)
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.interface.token_masks import TokenMask, num_words
from tilewright.errors import RequestError
from tilewright.runtime.grammar.annotations import ENFORCED_FORMATS, without_annotations
from tilewright.runtime.grammar.masks import write_allowed
from tilewright.runtime.grammar.matchers import MAX_BYTES, Grammars, Matcher
from tilewright.runtime.grammar.spec import CHOICE, JSON_SCHEMA, LARK, REGEX, GrammarSpec
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.messages import RequestFailed, RequestFinished
from tilewright.runtime.request import CANCELLED, FAILED, LENGTH, STOPPED, EngineRequest
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.service import EngineService, QueueTransport

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


ANNOTATIONS = ("password", "binary", "byte", "regex", "path", "idn-email", "iri", "int64", "own")


@pytest.mark.parametrize("form", ANNOTATIONS)
def test_schema_unknown_format_is_an_annotation(form: str) -> None:
    text = {"type": "string", "format": form, "maxLength": 3}
    for schema in (
        text,
        {"type": ["string", "null"], "format": form},
        {
            "type": "object",
            "properties": {"a": {"items": text}, "b": {"$ref": "#/$defs/c"}},
            "$defs": {"c": {"anyOf": [text, {"type": "null"}]}},
        },
    ):
        grammars().check(spec(JSON_SCHEMA, schema))
    bounded = Grammars.matcher(grammars(), spec(JSON_SCHEMA, text), (END,))
    assert bounded._matcher.try_consume_tokens(list(b'"abcd"')) == len('"abc')


def test_schema_known_formats_are_enforced() -> None:
    """A new format in the library must be added to our list."""
    with pytest.raises(RequestError, match="Unknown format"):
        grammars().check(spec(LARK, 'start: %json {"type": "string", "format": "password"}'))
    for form in ENFORCED_FORMATS:
        grammars().check(spec(LARK, f'start: %json {{"type": "string", "format": "{form}"}}'))
    text = json.dumps({"type": "string", "format": "date"})
    assert without_annotations(text) == text


def test_schema_values_and_properties_named_format_stay() -> None:
    kept = {
        "properties": {"format": {"const": {"format": "own"}}, "a": {"enum": [{"format": "own"}]}},
        "default": {"format": "own"},
        "required": ["format"],
    }
    assert json.loads(without_annotations(json.dumps(kept))) == kept
    assert json.loads(without_annotations(json.dumps({**kept, "format": "own"}))) == kept
    for text in ('{"format"', '{"format": 1e999}', "[" * 10**5 + '"format"'):
        assert without_annotations(text) == text


CHOICES = ["yes", "no", 'ma"ybe', "é\n😀"]


def spec(kind: str, text: Any, **more: Any) -> GrammarSpec:
    return GrammarSpec(kind=kind, text=text if isinstance(text, str) else json.dumps(text), **more)


def request(
    grammar: GrammarSpec | None,
    *,
    number: int = 0,
    wanted: int = 400,
    temperature: float = 1.0,
    ends: tuple[int, ...] = (END,),
    **more: Any,
) -> RequestState:
    sampling = SamplingParams(
        temperature=temperature, seed=number, max_tokens=wanted, stop_token_ids=ends, **more
    )
    return RequestState(number, (number % 200, 7, 9), sampling, grammar=grammar)


def allowed_tokens(one: RequestState) -> np.ndarray:
    """Return the allowed tokens for a request, with dirty memory."""
    words = np.full(num_words(VOCAB), 0xA5A5A5A5, np.uint32)
    write_allowed(one, words)
    flags = TokenMask((Slot(0),), words[None]).flags(Slot(0), VOCAB)
    return np.flatnonzero(flags)


@functools.cache
def shared() -> Grammars:
    return grammars()


@pytest.fixture
def compiler() -> Grammars:
    return shared()


@pytest.fixture(params=[False, True], ids=["step by step", "ahead"])
def loop(request: pytest.FixtureRequest, compiler: Grammars) -> EngineLoop:
    return EngineLoop(RandomLogits(runs_ahead=request.param), grammars=compiler)


def test_every_answer_parses_and_validates(loop: EngineLoop) -> None:
    made = [request(spec(JSON_SCHEMA, PERSON), number=n, temperature=n % 3) for n in range(12)]
    free = [request(None, number=n, wanted=40, ends=()) for n in range(50, 56)]
    loop.generate([*made, *free])
    for one in made:
        assert one.finish_reason == STOPPED and one.output[-1] == END, text_of(one.output)
        jsonschema.validate(json.loads(text_of(one.output)), PERSON)
    alone = [request(None, number=n, wanted=40, ends=()) for n in range(50, 56)]
    EngineLoop(RandomLogits()).generate(alone)
    assert [one.output for one in free] == [one.output for one in alone], "others are left alone"
    assert sum(loop.stats.found["host_seconds/masks"].counts) > 0


def test_a_step_is_launched_before_the_last_is_read_and_chosen_behind_it() -> None:
    executable = RandomLogits(runs_ahead=True)
    EngineLoop(executable, grammars=shared()).generate([request(spec(REGEX, "a{3}"), wanted=3)])
    assert executable.log[:8] == [
        *("launch 0", "choose 0"),  # all output is read, so the mask is known
        *("launch 1", "read 0", "choose 1"),
        *("launch 2", "read 1", "choose 2"),
    ]


@pytest.mark.parametrize(
    ("grammar", "obeys"),
    [
        (spec(REGEX, r"[a-f]{3,5}-\d{2}"), re.compile(r"[a-f]{3,5}-\d{2}").fullmatch),
        (spec(CHOICE, CHOICES), CHOICES.__contains__),
        (spec(LARK, 'start: pair\npair: "(" pair? ")"'), re.compile(r"(\(+)(\)+)").fullmatch),
        (spec(JSON_SCHEMA, {"type": "object"}), lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_each_kind_is_obeyed(loop: EngineLoop, grammar: GrammarSpec, obeys: Any) -> None:
    made = [request(grammar, number=n, wanted=3000) for n in range(6)]
    loop.generate(made)
    for one in made:
        text = text_of(one.output)
        assert one.finish_reason == LENGTH or obeys(text), text
    assert any(one.finish_reason == STOPPED for one in made)


def test_an_answer_that_is_cut_short_is_the_beginning_of_a_whole_one(loop: EngineLoop) -> None:
    whole, short = (request(spec(JSON_SCHEMA, PERSON), wanted=most) for most in (400, 9))
    loop.generate([whole, short])
    assert short.finish_reason == LENGTH and short.output == whole.output[:9]


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_arrivals_cancels_and_preemption_change_no_answer(data: st.DataObject) -> None:
    """Preempted requests repeat their output, and the matcher continues."""
    compiler = shared()
    kinds = [None, spec(JSON_SCHEMA, PERSON), spec(REGEX, "[a-z]{5,40}")]
    picks = data.draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=6))
    ahead = data.draw(st.booleans())
    alone = []
    for number, kind in enumerate(picks):
        one = request(kind, number=number, wanted=30)
        EngineLoop(RandomLogits(), grammars=compiler).generate([one])
        alone.append(one.output)
    loop = EngineLoop(RandomLogits(max_num_seqs=3, runs_ahead=ahead), grammars=compiler)
    made = [request(kind, number=n, wanted=30) for n, kind in enumerate(picks)]
    gone = data.draw(st.sampled_from(made))
    for one in made:
        loop.add(one)
        for _ in range(data.draw(st.integers(0, 4))):
            loop.step()
        if data.draw(st.booleans()):
            loop.scheduler.evacuate()
            loop.executable.reset()
            loop._flight = None
    loop.cancel(gone)
    while loop.has_work():
        loop.step()
    for one, expected in zip(made, alone, strict=True):
        if one.finish_reason == CANCELLED:
            assert one.output == expected[: len(one.output)]
        else:
            assert one.output == expected


def test_the_grammar_begins_behind_the_think_block(loop: EngineLoop) -> None:
    """In the think block, all tokens except end tokens are allowed.

    Its last token may contain more text.
    """
    number = spec(REGEX, "[0-9]{3}", behind="</think>")
    inside = request(number, logit_bias=((UNTHINK, 9.0),))
    opened = request(spec(REGEX, "[0-9]{3}", behind="</think>", opener=THINK), number=1)
    pushed = request(
        spec(REGEX, "[0-9]{3}", behind="</think>", opener=THINK),
        number=2,
        logit_bias=((THINK, 40.0), (UNTHINK, 90.0)),
    )
    loop.generate([inside, opened, pushed])
    for one in (inside, pushed):
        at = one.output.index(UNTHINK)
        assert END not in one.output[:at]
        assert re.fullmatch(rb"[0-9]{3}", bytes(one.output[at + 1 : -1])), one.output
        assert one.output[-1] == END
    assert pushed.output[0] == THINK and opened.output[0] != THINK
    assert re.fullmatch(r"[0-9]{3}", text_of(opened.output))


def test_text_behind_the_mark_in_its_last_token_counts(compiler: Grammars) -> None:
    matcher = compiler.matcher(spec(REGEX, "abc", behind="=>"), (END,))
    matcher.follow([ord("x"), ord("=")])
    assert matcher.is_free and not matcher.is_met
    matcher._heard = b"x="
    matcher._tokens = type(
        "T",
        (),
        {  # a token with three characters
            "decode_bytes": staticmethod(lambda ids: b"> a"),
            "tokenize_bytes": staticmethod(lambda raw: list(raw)),
        },
    )()
    matcher.follow([ord("x"), ord("="), 0])
    assert not matcher.is_free and not matcher.error
    one = request(None)
    one.matcher, one.output = matcher, [ord("x"), ord("="), 0]
    assert allowed_tokens(one).tolist() == [ord("b")]


def test_a_finished_matcher_allows_the_end_tokens_alone(compiler: Grammars) -> None:
    one = request(spec(REGEX, "a|ab"), ends=(END, 65))
    assert one.grammar is not None
    one.matcher = compiler.matcher(one.grammar, one.sampling.stop_token_ids)
    found = []
    for token in (ord("a"), ord("b")):
        one.output.append(token)
        found.append(allowed_tokens(one).tolist())
    assert found == [[65, ord("b"), END], [65, END]]
    assert one.matcher.is_finished


def test_what_has_no_token_is_never_allowed(compiler: Grammars) -> None:
    one = request(spec(REGEX, r"(?s:.)*"))
    assert one.grammar is not None
    one.matcher = compiler.matcher(one.grammar, one.sampling.stop_token_ids)
    allowed = allowed_tokens(one)
    assert END in allowed and THINK not in allowed and allowed.max() < NUM_TOKENS


def test_an_answer_that_a_grammar_ends_before_any_token_is_said_to_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Matcher, "is_finished", True)
    transport = QueueTransport()
    service = EngineService(RandomLogits(), transport, grammars=shared())
    sampling = SamplingParams(max_tokens=5)  # without an end token
    transport.inbox.append(EngineRequest(1, (7, 9), sampling, 0, spec(REGEX, "")))
    while not (ends := [each for each in transport.outbox if isinstance(each, RequestFinished)]):
        assert service.turn() and not any(
            isinstance(each, RequestFailed) for each in transport.outbox
        )
    assert [(each.request_id, each.reason) for each in ends] == [(1, STOPPED)]
    assert ends[0].prefill_s >= 0 == ends[0].decode_s


def test_a_grammar_ends_an_answer_that_has_no_end_token(loop: EngineLoop) -> None:
    silent = EngineLoop(loop.executable, grammars=grammars(end_tokens=()))
    made = [request(spec(REGEX, "[ab]{4}"), number=n, ends=()) for n in range(3)]
    silent.generate(made)
    for one in made:
        assert one.finish_reason == STOPPED and re.fullmatch("[ab]{4}", text_of(one.output))


def test_min_tokens_does_not_hold_back_the_end_of_a_finished_grammar(loop: EngineLoop) -> None:
    short, long = (request(spec(REGEX, text), min_tokens=9) for text in ("ab", "a{2,20}"))
    loop.generate([short, long])
    assert text_of(short.output) == "ab" and short.finish_reason == STOPPED
    assert len(long.output) > 9


def test_an_empty_mask_ends_that_request_alone(loop: EngineLoop) -> None:
    bad, good = request(spec(REGEX, "abc")), request(spec(REGEX, "[a-z]{30}"), number=1)
    loop.add(bad)
    loop.add(good)
    while bad.matcher is None or not bad.output:
        loop.step()
    bad.matcher._matcher.consume_token(ord("z"))
    loop.generate([])
    assert bad.finish_reason == FAILED and "no token obeys the grammar" in bad.error
    assert bad.error_code == "engine_error"
    assert good.finish_reason == STOPPED and len(good.output) == 31


def test_a_request_waits_for_its_matcher_outside_the_running_set(
    loop: EngineLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    plain = Grammars.matcher

    def late(self: Grammars, *given: Any) -> Any:
        gate.wait(10)
        return plain(self, *given)

    monkeypatch.setattr(Grammars, "matcher", late)
    slow, gone = (request(spec(REGEX, "ab"), number=n) for n in (1, 2))
    free = request(None, number=3, wanted=5, ends=())
    for one in (slow, gone, free):
        loop.add(one)
    while free.finish_reason is None:
        loop.step()
    assert not loop.scheduler.has_work() and loop.has_work()
    assert loop.step() == []
    loop.cancel(gone)
    gate.set()
    while loop.has_work():
        loop.step()
    assert (text_of(slow.output), gone.finish_reason, gone.output) == ("ab", CANCELLED, [])


def test_a_loop_without_a_tokenizer_refuses_grammars() -> None:
    with pytest.raises(RequestError, match="no tokenizer"):
        EngineLoop(RandomLogits()).add(request(spec(REGEX, "a")))


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (spec(LARK, 'root ::= "a"'), "GBNF; allowed: Lark"),
        (spec(LARK, "start: nothing"), 'unknown name: "nothing"'),
        (spec(LARK, "start: " + "(" * 100_000), "too deeply nested"),
        (spec(LARK, 'a: "b"\n' * 5000), "5000 lines; allowed: up to 4096"),
        (spec(LARK, 'start: ("a"{1,1000}){1,1000} "b"\n' + 'x: "y"\n' * 4000), ""),
        (spec(REGEX, "("), "unclosed group"),
        (spec(REGEX, "(?=x)y"), "look-around"),
        (spec(REGEX, "a" * (MAX_BYTES + 1)), f"allowed: up to {MAX_BYTES}"),
        (spec(REGEX, "\ud800"), "lone surrogates"),
        (spec(REGEX, "a{1000000}"), "too many expressions"),
        (spec(JSON_SCHEMA, {"type": "nope"}), "Invalid type: nope"),
        (spec(JSON_SCHEMA, {"if": {}}), 'Unimplemented keys: ["if"]'),
        (spec(JSON_SCHEMA, {"$ref": "#"}), "NoExtension"),
        (spec(JSON_SCHEMA, '{"items":' * 5000 + "true" + "}" * 5000), "recursion limit"),
        (spec(JSON_SCHEMA, {"anyOf": [{"properties": {f"a{i}": {}}} for i in range(1001)]}), ""),
    ],
)
def test_what_cannot_be_obeyed_is_refused(
    compiler: Grammars, grammar: GrammarSpec, said: str
) -> None:
    with pytest.raises(RequestError) as error:
        compiler.check(grammar)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_rules_that_follow_each_other_for_long_have_room(loop: EngineLoop) -> None:
    """With a normal thread stack, the library's recursion would crash the process."""
    arrays = [{"items": {"$ref": f"#/$defs/{n + 1}"}, "type": "array"} for n in range(2000)]
    names = {str(n): each for n, each in enumerate([*arrays, {"type": "integer"}])}
    schema = {"$ref": "#/$defs/0", "$defs": names}
    rules = "\n".join(f'R{n}: ("x" R{n + 1})?' for n in range(3000))
    long = spec(LARK, f'start: R0\n{rules}\nR3000: "a"')
    both = spec(JSON_SCHEMA, schema), long
    made = [request(each, wanted=20, number=n) for n, each in enumerate(both)]
    loop.generate(made)
    assert all(one.finish_reason in (LENGTH, STOPPED) for one in made)


def test_a_compiler_that_raises_costs_its_request_alone(
    loop: EngineLoop, compiler: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*given: object) -> None:
        raise ValueError("a bug of the library")

    monkeypatch.setattr(compiler, "matcher", raises)
    hit, other = request(spec(REGEX, "a{3}"), wanted=3), request(None, number=1, wanted=4, ends=())
    loop.generate([hit, other])
    assert hit.finish_reason == "error" and "a bug of the library" in hit.error
    assert len(other.output) == 4
