"""Measures of the prose in a file: docstrings, comments, help texts, errors and Markdown.

``python tests/prose.py [PATH ...]`` prints the files over budget, worst first, and exits with 1 if
there are any. ``tests/test_prose.py`` is the ratchet. Counts words, not meaning: a reviewer finds
fragments and wrong terms.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

MIN_WORDS = 100
"""Rates of shorter files are counts per this number of words. Only rates and the longest sentence
of shorter files have limits, and only the longest sentence of shorter tests.
"""

_LISTED = {
    "relative": "that which who whom whose where what whatever whoever whichever wherever",
    "vague": "those one ones other others it such so each nobody somebody anybody everybody thing "
    "things something anything",
    "house": "behind beside besides alone apart anew alike nowhere tell tells told say says said "
    "hear hears heard ask asks asked stand stands lie lies lay deal deals dealt seat seats seated "
    "sit sits sitting piece pieces ride rides riding hold holds held keeps kept comes goes gone "
    "lest hence ours theirs",
    "of": "of",
}
WORD_LISTS = {name: frozenset(words.split()) for name, words in _LISTED.items()}
RATES = (*WORD_LISTS, "numbers")
"""Measures per 100 words."""
BUDGET: Mapping[str, float] = MappingProxyType(
    {
        **{"relative": 2.5, "vague": 3.0, "house": 0.8, "of": 4.5},  # per 100 words
        "joins": 0.4,  # semicolons and colons per sentence
        "numbers": 5.0,  # per 100 words
        **{"median": 17, "p90": 32, "longest": 35},  # words per sentence
    }
)
_NATIVE = frozenset((".cu", ".cuh", ".cpp", ".h", ".inl"))
SUFFIXES = _NATIVE | {".py", ".md"}

_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_NUMBER = re.compile(r"(?<![\w.-])\d[\d,.]*(?=[\s%;:)]|$)")
_DIRECTIVE = re.compile(r"^(#!|# ?(fmt|type|noqa|ruff|mypy|pragma|SPDX|Copyright))|[-=_]{5}")
_TEXT_OR_COMMENT = re.compile(  # a hash inside a string starts no comment
    r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"'
    r"|'''(?:\\.|[^\\])*?'''|'(?:\\.|[^'\\\n])*'|(?P<comment>#[^\n]*)",
    re.S,
)
_NATIVE_COMMENT = re.compile(r"(?:^[ \t]*//[^\n]*\n)+|/\*.*?\*/|//[^\n]*", re.S | re.M)
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+(?=[A-Z\"'(*])|\n\s*\n")
_LEAVES = ast.expr_context | ast.operator | ast.cmpop | ast.Name | ast.Constant
_STOP = "\n\n"
_NOUN = " Code "
_CLEANING = (
    (re.compile(r"(?ms)^(```|~~~).*?^\1"), _STOP),  # fences
    (re.compile(r"(?s)<!--.*?-->"), " "),
    (re.compile(r"(?m)^\s*(\|.*|#+ .*|>>> .*|\.\.\. .*|(    |\t)+[\[{(@].*|[=~^*-]{3,})$"), "\n"),
    (re.compile(r"``[^`]+``|(:\w+)*:?`[^`]+`|\$[^$\n]+\$"), _NOUN),  # code spans
    (re.compile(r"!?\[([^\]]*)\]\([^)]*\)"), r"\1"),  # links
    (re.compile(r"https?://\S+|\S+/\S+/\S*|<[^>\n]{1,60}>"), _NOUN),  # paths
    (re.compile(r"(?m)^\s*([-*+:]|\d+\.)\s+"), _STOP),  # list items
    (re.compile(r"(?m)^\s*\*{0,2}[\w, ]{1,40}(\([^)]*\))?:(\s|$)"), _STOP),  # heads: "Args:"
    # Options must state their default in this form (tests/cli/sweep/test_sweep_options.py), so the
    # colon is no join, as in the form of errors.
    (re.compile(r"\(default: "), "(default "),
)


@dataclass(frozen=True, slots=True)
class Prose:
    """Measures of one file: number of words, and a value for each entry of `BUDGET`."""

    num_words: int
    values: Mapping[str, float]
    is_test: bool = False

    def excess(self) -> dict[str, float]:
        """Return the measures over budget, as shares of the budget above 1."""
        values = dict(self.values)
        if self.num_words < MIN_WORDS:
            rates = () if self.is_test else RATES
            values = {name: values[name] * self.num_words / MIN_WORDS for name in rates}
            values["longest"] = self.values["longest"]
        shares = {name: value / BUDGET[name] - 1 for name, value in values.items()}
        return {name: share for name, share in shares.items() if share > 0}


def measure(path: Path) -> Prose:
    """Measure the prose of a Python, C++, CUDA or Markdown file."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        texts = [*_strings(ast.parse(source)), *_comments(source)]
    elif path.suffix in _NATIVE:
        found = _NATIVE_COMMENT.findall(source)
        texts = [re.sub(r"(?m)^[ \t]*(//+|/?\*+/?)", "", each) for each in found]
    else:
        texts = [source]
    return replace(measure_texts(texts), is_test="tests" in path.parts)


def measure_texts(texts: list[str]) -> Prose:
    """Measure texts, without code, tables and headings."""
    sentences = []
    for text in texts:
        for pattern, replacement in _CLEANING:
            text = pattern.sub(replacement, text)
        sentences += [part for part in _SENTENCE_END.split(text) if len(_WORD.findall(part)) > 1]
    words = [[word.lower() for word in _WORD.findall(sentence)] for sentence in sentences]
    lengths = sorted(map(len, words)) or [0]
    total = max(1, sum(lengths))
    values: dict[str, float] = {}
    for name, listed in WORD_LISTS.items():
        values[name] = 100 * sum(word in listed for sentence in words for word in sentence) / total
    values["joins"] = sum(s.count(";") + s.count(": ") for s in sentences) / len(lengths)
    values["numbers"] = 100 * sum(len(_NUMBER.findall(s)) for s in sentences) / total
    values["median"], values["longest"] = lengths[len(lengths) // 2], lengths[-1]
    values["p90"] = lengths[int(len(lengths) * 0.9)]
    return Prose(sum(lengths), values)


def _strings(tree: ast.Module) -> Iterator[str]:
    """Yield docstrings, help texts and error messages."""
    for node in _nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            # The parts of "<where>: <what>; allowed: <values>" are sentences.
            for argument in node.exc.args:
                yield re.sub(r"; allowed: |: ", "." + _STOP, _literal(argument))
        elif isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg in ("help", "description"):
                    yield _literal(keyword.value)
            if isinstance(node.func, ast.Name) and node.func.id == "option" and node.args:
                yield _literal(node.args[0])


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes with children. `ast.walk` also visits names and their contexts."""
    pending = [tree]
    while pending:
        yield (node := pending.pop())
        for name in node._fields:
            value = getattr(node, name)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, _LEAVES):
                    pending.append(child)


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _literal(part) if isinstance(part, ast.Constant) else _NOUN for part in node.values
        )
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _comments(source: str) -> Iterator[str]:
    """Yield comments. Consecutive lines are one text."""
    text, line, previous, at = "", 1, -1, 0
    for found in _TEXT_OR_COMMENT.finditer(source):
        comment = found["comment"]
        if comment is None or _DIRECTIVE.search(comment):
            continue
        line += source.count("\n", at, found.start())
        at = found.start()
        if line != previous + 1:
            yield text
            text = ""
        text += "\n" + comment.lstrip("# ")
        previous = line
    yield text


def main(paths: list[str]) -> int:
    """Print the files over budget, worst first."""
    named = [Path(each) for each in paths or ["."]]
    files = [f for p in named for f in (sorted(p.rglob("*")) if p.is_dir() else [p])]
    rows = []
    for path in files:
        if path.suffix in SUFFIXES and path.is_file():
            prose = measure(path)
            excess = prose.excess()
            if excess:
                rows.append((sum(excess.values()) * prose.num_words, path, excess))
    for _, path, excess in sorted(rows, reverse=True):
        print(path, *(f"{name} +{100 * share:.0f} %" for name, share in excess.items()))
    return 1 if rows else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
