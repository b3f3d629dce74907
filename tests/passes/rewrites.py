"""The rewrite of a pass as text: lines before (``-``) and after (``+``)."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections import Counter
from collections.abc import Iterator

_DEFINITION = re.compile(r"%(\d+): .*? = (?:aten\.)?(\w+)[\w.]*\(")


def rewrite_text(before: str, after: str) -> str:
    """Compare two texts of a graph, without the names of layers.

    A value is named after its operator and a count. A value of both texts has a single name. Values
    from outside of the text are named ``in0``, ``in1`` ...
    """
    old, new = (re.sub(r"model\.(layers\.\d+\.)?|\.weight\b", "", x) for x in (before, after))
    texts = old.splitlines(), new.splitlines()
    counts: Counter[str] = Counter()
    names: tuple[dict[str, str], dict[str, str]] = {}, {}
    for kind, i, j, k, m in _changes(*([re.sub(r"%\d+", "%", x) for x in text] for text in texts)):
        for side, lines in ((0, texts[0][i:j]), (1, texts[1][k:m])):
            for index, line in enumerate(lines):
                if not (found := _DEFINITION.match(line)):
                    continue
                if kind == "equal" and side:
                    other = _DEFINITION.match(texts[0][i + index])
                    assert other is not None
                    names[1][found[1]] = names[0][other[1]]
                    continue
                names[side][found[1]] = f"{found[2]}{counts[found[2]]}"
                counts[found[2]] += 1
    named = [_renamed(text, own) for text, own in zip(texts, names, strict=True)]
    lines = []
    for kind, i, j, k, m in _changes(*named):
        if kind != "equal":
            lines += [f"- {line}" for line in named[0][i:j]] + [f"+ {x}" for x in named[1][k:m]]
    return "\n".join(_wrapped(line) for line in lines)


def _renamed(text: list[str], names: dict[str, str]) -> list[str]:
    used = dict.fromkeys(re.findall(r"%(\d+)", "\n".join(text)))
    outside = (number for number in used if number not in names)
    names = {**names, **{number: f"in{index}" for index, number in enumerate(outside)}}
    return [re.sub(r"%(\d+)", lambda found: f"%{names[found[1]]}", line) for line in text]


def _changes(old: list[str], new: list[str]) -> Iterator[tuple[str, int, int, int, int]]:
    yield from difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, 98, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False
    )
