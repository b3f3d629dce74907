"""Rows through the server's own loop: answers, errors alone, steps that fail, order of feeding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.batch.rows import completion, null_engine, null_executable, record, run
from tilewright.batch.figures import Meter
from tilewright.batch.records import Item, Record
from tilewright.compiler.targets.interface.step import Step, StepOutput
from tilewright.errors import CompileError
from tilewright.runtime.scheduling.request_state import SchedulerConfig
from tilewright.runtime.speculative.config import SpeculativeConfig


def test_more_rows_than_slots_are_answered_each_once(tmp_path: Path) -> None:
    engine = null_engine(tmp_path)
    ended = list(run(engine, [completion(row, max_tokens=1 + row % 7) for row in range(50)]))
    assert sorted(each.record.row for each in ended) == list(range(50))
    for each in ended:
        said = each.record.said()
        assert said["usage"]["completion_tokens"] == 1 + each.record.row % 7
        assert said["choices"][0]["text"] == "\x00" * (1 + each.record.row % 7)
        assert each.first_s is not None and each.total_s is not None
        assert 0 <= each.first_s <= each.total_s
    assert engine.num_output == sum(1 + row % 7 for row in range(50))
    assert engine.num_first == 50 and 0 < engine.num_steps < engine.num_output


def test_what_the_server_would_refuse_fails_alone(tmp_path: Path) -> None:
    items = [
        completion(0, max_tokens=2),
        completion(1, temperature=-1),
        completion(2, prompt="x" * 500),
        Item(3, False, b'{"prompt'),
        record(4, "of no row", status=400),
        Item(5, True, msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}]})),
        completion(6, prompt=[1, 2, 999]),
        completion(7, max_tokens=1, suffix="s"),
        completion(8, max_tokens=2),
    ]
    found = {each.record.row: each.record for each in run(null_engine(tmp_path), items)}
    assert sorted(found) == list(range(9))
    assert [row for row, each in found.items() if each.is_ok] == [0, 8]
    messages = {row: each.error()["message"] for row, each in found.items() if not each.is_ok}
    assert "temperature" in messages[1] and "allowed: 64 tokens" in messages[2]
    assert "not valid JSON" in messages[3] and messages[4] == "of no row"
    assert "no chat template" in messages[5] and "token 999" in messages[6]
    assert found[2].error()["code"] == "context_length_exceeded" and "suffix" in messages[7]


@pytest.mark.parametrize("stop", [[], ["x"]], ids=["decoded at the end", "watched"])
def test_timings_of_a_row_have_its_drafts(tmp_path: Path, stop: list[str]) -> None:
    config = SpeculativeConfig(max_lookup=2, min_lookup=1, schedule=((1, 9, 3),))
    engine = null_engine(tmp_path, policy=SchedulerConfig(speculative=config))
    body: dict[str, Any] = {"max_tokens": 20, "timings": True, "stop": stop}
    items: list[Item | Record] = [completion(0, **body)]
    items.append(completion(1, speculative=False, **body))
    found = {each.record.row: each.record.said()["timings"] for each in run(engine, items)}
    assert found[0]["draft_n"] >= found[0]["draft_n_accepted"] > 9
    assert "draft_n" not in found[1]


def test_stop_strings_choices_and_echo_are_as_the_servers(tmp_path: Path) -> None:
    items = [
        completion(0, max_tokens=40, stop="\x00\x00\x00"),
        completion(1, max_tokens=3, n=3, temperature=1.0),
        completion(2, max_tokens=2, echo=True, logprobs=1),
        completion(3, max_tokens=2, prompt=["ab", "cd"]),
    ]
    found = {each.record.row: each.record for each in run(null_engine(tmp_path), items)}
    (stopped,) = found[0].said()["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    assert found[0].completion_tokens == 3
    assert [each["index"] for each in found[1].said()["choices"]] == [0, 1, 2]
    assert found[1].completion_tokens == 9
    echoed = found[2].said()["choices"][0]
    assert echoed["text"] == "abc\x00\x00" and len(echoed["logprobs"]["tokens"]) == 5
    assert len(found[3].said()["choices"]) == 2


def test_the_same_row_has_the_same_answer_whenever_it_is_asked(tmp_path: Path) -> None:
    items = [completion(row, max_tokens=6, temperature=1.0, timings=True) for row in range(6)]
    bodies = []
    for name, order in (("a", items), ("b", items[::-1])):
        found = {each.record.row: each.record for each in run(null_engine(tmp_path / name), order)}
        bodies.append([found[row].said()["choices"] for row in range(6)])
        assert len({found[row].said()["timings"]["seed"] for row in range(6)}) == 6
        assert found[0].said()["id"] == "cmpl-0"
    assert bodies[0] == bodies[1]


def test_a_step_that_fails_costs_its_newest_row_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = null_executable()
    step, calls = executable.step, iter(range(1000))

    def failing(given: Step) -> StepOutput:
        if next(calls) == 6:
            raise RuntimeError("no memory for it")
        return step(given)

    monkeypatch.setattr(executable, "step", failing)
    engine = null_engine(tmp_path, executable)
    ended = list(run(engine, [completion(row, max_tokens=4) for row in range(12)]))
    failed = [each.record for each in ended if not each.record.is_ok]
    assert len(ended) == 12 and len(failed) == 1
    assert failed[0].status == 500 and "no memory for it" in failed[0].error()["message"]


def test_a_device_that_is_lost_ends_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = null_executable()

    def lost(given: Step) -> StepOutput:
        raise RuntimeError("CUDA error: unspecified launch failure")

    engine = null_engine(tmp_path, executable)
    monkeypatch.setattr(executable, "step", lost)
    with pytest.raises(CompileError, match=r"CUDA error: .*; --resume continues"):
        list(run(engine, [completion(0)]))


def test_figures_tell_the_baselines_lines_and_the_tail(tmp_path: Path) -> None:
    engine, meter = null_engine(tmp_path), Meter()
    for ended in engine.run(iter(completion(row, max_tokens=5) for row in range(40))):
        meter.take(
            ended, num_steps=engine.num_steps, num_decoded=engine.num_output - engine.num_first
        )
    meter.take([next(run(null_engine(tmp_path / "b"), [record(40, "x", status=400)]))])
    lines = meter.lines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        *("Throughput", "Tokens/s", "Prompt_num_tokens", "Total_num_tokens"),
    ]
    assert lines[2:4] == ["Prompt_num_tokens: 120 tokens", "Total_num_tokens: 320 tokens"]
    values = meter.values()
    assert values["rows"] == 41 and values["failed"] == 1 and values["output_tokens"] == 200
    assert values["ttft_ms_p50"] <= values["ttft_ms_p99"] <= values["latency_ms_p99"]
    assert json.dumps(values)


def test_the_mean_batch_is_what_decoded_together(tmp_path: Path) -> None:
    engine, meter = null_engine(tmp_path, null_executable(slots=4)), Meter()
    for ended in engine.run(iter(completion(row, max_tokens=9) for row in range(40))):
        meter.take(
            ended, num_steps=engine.num_steps, num_decoded=engine.num_output - engine.num_first
        )
    assert 3.0 < meter.mean_batch <= 4.0
    tail = meter.tail
    assert tail is not None and 0 <= tail.seconds <= meter.seconds and tail.mean_batch <= 4.0


def test_grammars_hold_and_bad_ones_fail_alone(tmp_path: Path) -> None:
    items = [
        completion(0, max_tokens=9, structured_outputs={"choice": ["yes", "no"]}),
        completion(1, max_tokens=9, structured_outputs={"regex": "("}),
        completion(2, max_tokens=2, structured_outputs={"regex": "a", "choice": ["b"]}),
    ]
    engine = null_engine(tmp_path, ignore_eos=False)
    found = {each.record.row: each.record for each in run(engine, items)}
    assert found[0].said()["choices"][0]["text"] in ("yes", "no")
    assert [found[row].error()["code"] for row in (1, 2)] == ["invalid_grammar", "invalid_value"]


_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
)
_TOOL = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_chats_and_their_tools_are_rendered_by_the_template(tmp_path: Path) -> None:
    def chat(row: int, **body: object) -> Item:
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **body}
        return Item(row, True, msgspec.json.encode(asked))

    tools = [{"type": "function", "function": _TOOL}]
    items = [
        chat(0),
        chat(1, tools=tools),
        chat(2, tools=tools, tool_choice="required"),
        chat(3, tools=[{"type": "function", "function": {"name": "no such name"}}]),
        chat(4, messages=[]),
        chat(5, top_logprobs=3),
    ]
    executable = null_executable(context=512)
    engine = null_engine(tmp_path, executable, ignore_eos=False, chat_template=_TEMPLATE)
    found = {each.record.row: each.record for each in run(engine, items)}
    assert [row for row, each in sorted(found.items()) if each.is_ok] == [0, 1, 2]
    assert found[0].prompt_tokens == len("<user>hi") < found[1].prompt_tokens
    message = found[0].said()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "\x00\x00\x00"}
    assert "\x00" not in found[2].said()["choices"][0]["message"]["content"]
    assert found[0].said()["object"] == "chat.completion"
