"""``python -m bench make-batch``: write a data set with lengths as in the ASC24 contest.

The file is a JSON list with ``[prompt, prompt_len, output_len]``. Lengths are log-normal: prompts
have 4 to 1,024 tokens, and answers have 6 to 1,776 tokens. Texts have several scripts.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import ConfigError
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.files import create_file

Row = tuple[str, int, int]
PROMPTS, OUTPUTS = (4, 1024), (6, 1776)
"""Minimum and maximum tokens."""

_PROMPT_BODY, _OUTPUT_BODY = (math.log(110), 1.05), (math.log(170), 0.95)
"""Mean and deviation of the logarithms."""

_URL = "/v1/completions"
_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_BAR = 40

_SPACED = {
    "English": "the river a bridge old winter town market between stone letters carried morning "
    "ship engine question number why does explain how small garden history",
    "Spanish": "el río un puente viejo invierno pueblo mercado entre piedra cartas mañana barco "
    "pregunta número por qué explica cómo jardín pequeño historia",
    "German": "der Fluss eine Brücke alter Winter Stadt Markt zwischen Stein Briefe Morgen Schiff "
    "Frage Zahl warum erkläre wie klein Garten Geschichte",
    "French": "la rivière un pont vieux hiver ville marché entre pierre lettres matin bateau "
    "question nombre pourquoi explique comment petit jardin histoire",
    "Russian": "река мост старый зима город рынок между камень письма утро корабль вопрос число "
    "почему объясни как маленький сад история",
    "Arabic": "النهر جسر قديم شتاء مدينة سوق بين حجر رسائل صباح سفينة سؤال رقم لماذا كيف حديقة",
    "Hindi": "नदी पुल पुराना सर्दी शहर बाज़ार बीच पत्थर पत्र सुबह जहाज़ सवाल संख्या क्यों कैसे",
    "Korean": "강 다리 오래된 겨울 마을 시장 사이 돌 편지 아침 배 질문 숫자 왜 어떻게 정원 역사",
}
_JOINED = {
    "Chinese": "河流桥梁古老冬天城市市场之间石头信件早晨船只问题数字为什么解释怎样小花园历史",
    "Japanese": "川の橋は古い冬町市場石と手紙朝船質問数字なぜ説明どう小さい庭歴史です",
}
_SHARES = {"English": 40, "Chinese": 20, "Spanish": 8, "Korean": 6, "Japanese": 6}
_SHARES |= {"German": 5, "French": 5, "Russian": 5, "Arabic": 3, "Hindi": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    rows: int = option("rows to write", default=10_000, type=integer(1, 10_000_000))
    seed: int = option("seed for lengths and texts", default=0, type=integer(0, 1 << 31))
    token_ids: int | None = option(
        "write OpenAI batch lines with random token ids below N, exact lengths and ignore_eos, so "
        "that all engines have the same work",
        type=integer(2, 1 << 31),
        metavar="N",
    )
    output: str = option("new file", "-o", "--output", default="batch.json", metavar="FILE")


def main(argv: list[str]) -> int:
    """Write the data set and print its histogram. Return the exit code."""
    text = "Write a data set with prompts and output lengths as in ASC24."
    options = parse(_Options, argv, prog="python -m bench make-batch", description=text)
    rows = make_rows(options.rows, seed=options.seed)
    if options.token_ids is None:
        listed = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        data = f"[\n{listed}\n]\n"
    else:
        data = "".join(f"{json.dumps(each)}\n" for each in token_rows(rows, options.token_ids))
    path = Path(options.output)
    try:
        create_file(path, data.encode())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--output {path}: {reason}; allowed: a new file") from None
    print("\n".join(histogram(rows)))
    return 0


def make_rows(count: int, *, seed: int) -> list[Row]:
    """Return a seed's rows. A larger count has the same first rows."""
    rows = []
    for number in range(count):
        draw = random.Random(f"{seed} {number}")
        length = _length(draw, _PROMPT_BODY, PROMPTS)
        (language,) = draw.choices(list(_SHARES), list(_SHARES.values()))
        prompt, num_tokens = _text(draw, language, length)
        rows.append((prompt, num_tokens, _length(draw, _OUTPUT_BODY, OUTPUTS)))
    return rows


def token_rows(rows: Sequence[Row], vocabulary: int) -> list[dict[str, Any]]:
    """Return requests for OpenAI's batch format with the same lengths and random ids."""
    found = []
    for number, (_, num_prompt, num_output) in enumerate(rows):
        draw = random.Random(number)
        prompt = [draw.randrange(vocabulary) for _ in range(num_prompt)]
        body = {"prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0}
        found.append({"custom_id": f"row-{number}", "method": "POST", "url": _URL, "body": body})
    return found


def histogram(rows: Sequence[Row]) -> list[str]:
    """Return a length histogram as text lines."""
    lines = [f"{len(rows):,} rows"]
    for name, values in (("prompts", [row[1] for row in rows]), ("answers", [r[2] for r in rows])):
        mean = sum(values) / len(values)
        lines.append(f"{name}: {min(values)} to {max(values)} tokens, mean {mean:.0f}")
        least = 0
        for most in _BUCKETS:
            count = sum(least < value <= most for value in values)
            bar = "#" * round(_BAR * count / len(values))
            if count:
                lines.append(f"  {least + 1:>5} to {most:>5} {count:>7,} {bar}")
            least = most
    return lines


def _length(draw: random.Random, body: tuple[float, float], ends: tuple[int, int]) -> int:
    """Draw a length until it is within ``ends``, because the contest excluded other rows."""
    while True:
        found = round(draw.lognormvariate(*body))
        if ends[0] <= found <= ends[1]:
            return found


def _text(draw: random.Random, language: str, length: int) -> tuple[str, int]:
    """Return a text with about ``length`` tokens, and its approximate token count."""
    if language in _JOINED:
        characters = _JOINED[language]
        return "".join(draw.choices(characters, k=length)), length
    words = _SPACED[language].split()
    cost = 1 if language in ("English", "Spanish", "German", "French") else 2
    chosen = draw.choices(words, k=max(1, length // cost))
    return " ".join(chosen), max(PROMPTS[0], len(chosen) * cost)
