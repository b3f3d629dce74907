"""``tilewright chat``: turns piped in or typed, commands between them, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tilewright import LLM
from tilewright.cli.arguments.ask import ModelStatusLine, read_args
from tilewright.cli.commands import chat
from tilewright.cli.main import main
from tilewright.models.tokenizer.chat_template import Message
from tilewright.models.tokenizer.tokenizer import StreamDecoder

FEW = ("--max-tokens", "6")
Piped = Callable[..., tuple[int, str, str]]


@pytest.fixture
def piped(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Piped:
    """Exit code, standard output and error of a conversation from these lines."""

    def talk(lines: str, *argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        code = main(["chat", str(tiny_gguf), *FEW, *argv])
        return code, *capfd.readouterr()

    return talk


def test_lines_are_turns_of_one_conversation(piped: Piped, tiny_gguf: Path, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    code, out, error = piped(f"hello\n\n//why?\n/save {saved}\n", "--system", "be brief")
    facts = json.loads(saved.read_text())
    roles = [each["role"] for each in facts["messages"]]
    assert (code, roles) == (0, ["system", "user", "assistant", "user", "assistant"])
    assert facts["messages"][3]["content"] == "/why?"
    answers: list[str] = []
    with LLM(tiny_gguf, max_context=512, use_cache=False) as llm:
        for turn in (2, 4):
            messages: list[Message] = facts["messages"][:turn]
            answers.append(llm.chat(messages, max_tokens=6).text)
    assert out == "".join(f"{answer}\n" for answer in answers)
    assert [facts["messages"][turn]["content"] for turn in (2, 4)] == answers
    assert error.count(" tokens in ") == 2 and f"saved in {saved}" in error


def test_settings_are_of_the_answers_that_follow(piped: Piped) -> None:
    code, out, error = piped(
        "/set\n/set max_tokens 2\n/set system be kind\n/set\nhello\n/clear\n/help\n/quit\nnever\n"
    )
    assert code == 0 and "never" not in out
    assert "max_tokens 6\n" in error and "max_tokens 2\nsystem be kind\n" in error
    assert "2 tokens in " in error and "/save FILE" in error


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("/sve x\n", "unknown command /sve; allowed: /help, /set, /save, /clear, /quit; did you"),
        ("/set temprature 1\n", "; did you mean 'temperature'?"),
        ("/set seed x\n", "seed 'x'; allowed: a number"),
        ("/set top_p 7\n", "top_p 7.0; allowed: 0 to 1"),
        ("/save\n", "/save without a file; allowed: /save FILE"),
        ("/save /no/such/place\n", "/no/such/place: cannot be written"),
        ("word " * 2000, "do not fit the context"),
    ],
)
def test_piped_lines_stop_at_the_first_that_cannot_be_done(
    piped: Piped, lines: str, said: str
) -> None:
    code, out, error = piped(lines)
    assert (code, out) == (2, "") and said in error.splitlines()[-1]


def test_a_model_without_a_template_is_refused(refused: Refused, tiny_folder: Path) -> None:
    said = refused(str(tiny_folder), verb="chat")
    assert "has no chat template; allowed: a chat model, or tilewright run" in said


@pytest.fixture
def talk(tiny_gguf: Path) -> Iterator[chat.Talk]:
    argv = [str(tiny_gguf)]
    asked = read_args(
        argv, chat._ChatArgs, ModelStatusLine(), prog="tilewright chat", description=""
    )
    with LLM(tiny_gguf, max_num_seqs=1, use_cache=False) as llm:
        yield chat.Talk(llm, asked, ModelStatusLine())


def test_ctrl_c_stops_an_answer_and_not_the_program(
    talk: chat.Talk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    talk.process("/set max_tokens 200")
    pushed = 0
    push = StreamDecoder.push

    def count(decoder: StreamDecoder, index: int) -> str:
        nonlocal pushed
        pushed += 1
        if pushed == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return push(decoder, index)

    monkeypatch.setattr(StreamDecoder, "push", count)
    before = signal.getsignal(signal.SIGINT)
    assert talk.process("hello")
    assert signal.getsignal(signal.SIGINT) is before
    assert 3 <= pushed < 20 and "stopped" in capfd.readouterr().err
    assert talk.messages[0] == {"role": "user", "content": "hello"}, "what was said stays said"
    assert talk.process("/set max_tokens 2") and talk.process("again")
    assert "2 tokens" in capfd.readouterr().err


def test_a_typed_mistake_is_said_and_the_conversation_goes_on(
    talk: chat.Talk, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["/wrong", KeyboardInterrupt(), "/set max_tokens 2", "hello"])

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    chat._talk_typed(talk, ModelStatusLine())
    error = capfd.readouterr().err
    assert "unknown command /wrong" in error and "Ctrl-D or /quit leaves" in error
    assert "2 tokens" in error


def test_what_was_typed_is_there_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readline = pytest.importorskip("readline")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    with chat._history(False):
        readline.add_history("hello there")
    readline.clear_history()
    with chat._history(False):
        assert readline.get_history_item(readline.get_current_history_length()) == "hello there"
    assert (tmp_path / "chat_history").stat().st_mode & 0o777 == 0o600
    readline.clear_history()
