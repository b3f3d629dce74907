"""``tilewright chat``: a conversation, typed or piped in line by line."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from tilewright.cli.arguments.ask import (
    AskArguments,
    ModelStatusLine,
    PromptArgs,
    compile_model,
    cost_line,
    messages_of,
    open_model,
    read_args,
)
from tilewright.cli.arguments.sampling import SAMPLING_NAMES
from tilewright.compiler.sampling.params import range_of, sampling_of
from tilewright.errors import ConfigError, RequestError, TilewrightError, allowed
from tilewright.options.arguments import option
from tilewright.utils.files import cache_dir, create_file

if TYPE_CHECKING:
    from tilewright.llm import LLM

_HISTORY_LINES = 1000
_HELP = """\
/help              list the commands
/set               show the settings
/set NAME VALUE    set {names}
/save FILE         write the conversation as JSON
/clear             start again
/quit              leave, as Ctrl-D
//text             a message with a slash at the beginning
Ctrl-C             stop an answer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChatArgs(AskArguments):
    no_history: bool = option("do not save the typed lines", default=False)


def main(argv: list[str]) -> int:
    """Run ``tilewright chat``. Return the exit code."""
    sign, words = ModelStatusLine(), "Talk with a model, turn by turn."
    try:
        args = read_args(argv, _ChatArgs, sign, prog="tilewright chat", description=words)
        source = open_model(args, sign)
        if not source.tokenizer.has_chat_template:
            raise RequestError(
                f"{source.name} has no chat template; allowed: a chat model, or tilewright run"
            )
        llm = compile_model(args, source, sign)
    finally:
        sign.clear()
    is_typed = sys.stdin.isatty() and sys.stdout.isatty()
    talk = Talk(llm, args, sign)
    try:
        if is_typed:
            sign.note(f"{source.name}: /help says more, Ctrl-D leaves")
            with _history(args.arguments.no_history):
                _talk_typed(talk, sign)
        else:
            _talk_piped(talk)
    finally:
        llm.close()
    return 0


class Talk:
    """A conversation: its messages, and the settings for the next answer."""

    def __init__(self, llm: LLM, args: PromptArgs, sign: ModelStatusLine) -> None:
        self._llm, self._sign = llm, sign
        self._sampling: dict[str, Any] = dict(args.sampling)
        self.messages: list[dict[str, str]] = messages_of(args.arguments.system)

    def process(self, line: str) -> bool:
        """Process a line of the user. Return False if it ends the conversation.

        Raises:
            TilewrightError: for an impossible command, or a chat above the context.
        """
        line = line.strip()
        if not line:
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._obey(*_words(line[1:]))
        self._answer(line.removeprefix("/"))
        return True

    def _obey(self, word: str, rest: str) -> bool:
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "set": self._set,
            "save": self._save,
            "clear": self._clear,
        }
        if word in ("quit", "exit", "bye"):
            return False
        if word not in commands:
            known = allowed((*(f"/{name}" for name in commands), "/quit"), f"/{word}")
            raise ConfigError(f"unknown command /{word[:60]}; {known}")
        commands[word](rest)
        return True

    def _answer(self, text: str) -> None:
        """Stream the answer to a message. A Ctrl-C keeps the received part."""
        args = [*self.messages, {"role": "user", "content": text}]
        with _interruptible() as is_stopped, self._llm.stream_chat(args, **self._sampling) as said:
            for piece in said:
                print(piece, end="", flush=True)
                if is_stopped():
                    break
        print(flush=True)
        answer = said.answer
        self._sign.note(cost_line(self._llm, answer))
        if answer.text:
            self.messages = [*args, {"role": "assistant", "content": answer.text}]

    def _help(self, rest: str) -> None:
        self._sign.write_lines(_HELP.format(names=", ".join((*SAMPLING_NAMES, "system"))))

    def _set(self, rest: str) -> None:
        name, value = _words(rest)
        if not name:
            system = [each["content"] for each in self.messages[:1] if _is_system(each)]
            shown = [*self._sampling.items(), *(("system", text) for text in system)]
            lines = [f"{each} {set_to}" for each, set_to in shown]
            self._sign.write_lines("\n".join(lines or ["nothing is set"]))
        elif name == "system":
            others = [each for each in self.messages if not _is_system(each)]
            self.messages = [*messages_of(value), *others]
        else:
            self._sampling = _with(self._sampling, name, value)

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save without a file; allowed: /save FILE")
        facts = {
            "model": self._llm.source.name,
            "precision": self._llm.compiled.precision.name,
            "sampling": self._sampling,
            "messages": self.messages,
        }
        try:
            text = json.dumps(facts, ensure_ascii=False, indent=1)
            create_file(Path(rest).expanduser(), f"{text}\n".encode())
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{rest}: cannot be written ({reason}); allowed: a new file in a folder that is "
                "there"
            ) from None
        self._sign.note(f"saved in {rest}")

    def _clear(self, rest: str) -> None:
        self.messages = [each for each in self.messages[:1] if _is_system(each)]


def _is_system(message: dict[str, str]) -> bool:
    return message["role"] == "system"


def _words(text: str) -> tuple[str, str]:
    """Return the first word and the rest."""
    word, _, rest = text.strip().partition(" ")
    return word, rest.strip()


def _with(sampling: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """Return the sampling parameters with a typed value."""
    if name not in SAMPLING_NAMES:
        names = allowed((*SAMPLING_NAMES, "system"), name)
        raise ConfigError(f"unknown setting {name[:60]!r}; {names}")
    try:
        value = type(range_of(name).low)(text)
    except ValueError:
        raise ConfigError(f"{name} {text[:60]!r}; allowed: a number") from None
    found = {**sampling, name: value}
    sampling_of(found)
    return found


def _talk_typed(talk: Talk, sign: ModelStatusLine) -> None:
    """Read lines until the user leaves. Errors are printed and do not end the conversation."""
    while True:
        try:
            if not talk.process(input("> ")):
                return
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            sign.note("Ctrl-D or /quit leaves")
        except TilewrightError as error:
            sign.note(f"{error}; /clear begins anew" if talk.messages else str(error))


def _talk_piped(talk: Talk) -> None:
    """Read lines from standard input. The first error ends the conversation.

    Raises:
        TilewrightError: see `Talk.process`.
    """
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(
                f"line {number} of standard input is not valid UTF-8; allowed: UTF-8 text"
            ) from None
        if not talk.process(text):
            return


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C was pressed.

    A second Ctrl-C raises KeyboardInterrupt.
    """
    stopped = False

    def process(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, process)
    try:
        yield lambda: stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _history(is_off: bool) -> Iterator[None]:
    """Enable line editing and the earlier conversation history."""
    try:
        import readline
    except ImportError:  # some Python builds have no readline
        yield
        return
    path = cache_dir() / "chat_history"
    if not is_off:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        if not is_off:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                readline.write_history_file(path)
                path.chmod(0o600)
