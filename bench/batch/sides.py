"""Who answers the same rows in turn: ours, and llama.cpp's server with all of them at once."""

from __future__ import annotations

import http.client
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.in_turn import answer_of
from bench.serving.servers import llama_cpp, running
from tilewright.errors import TilewrightError

Bodies = Sequence[dict[str, Any]]
_TIMEOUT = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What both sides are given: rows at a time, positions of each, and threads."""

    seats: int
    context: int
    threads: int


def ours(rows: Path, model: str, precision: str, sizes: Sizes) -> dict[str, float]:
    """The figures of ``tilewright batch``, in a process of its own.

    Raises:
        TilewrightError: where it fails, or a row does.
    """
    words = ["batch", str(rows), "--model", model, "--precision", precision]
    words += ["--threads", str(sizes.threads), "--max-seats", str(sizes.seats)]
    return answer_of(*words, "--max-context", str(sizes.context))


def theirs(bodies: Bodies, binary: Path, model: Path, sizes: Sizes) -> dict[str, float]:
    """llama.cpp's server, asked for as many rows at a time as it has slots, the longest first.

    Raises:
        TilewrightError: where it does not start, or refuses a row.
    """
    contestant = llama_cpp(
        binary, model, users=sizes.seats, context=sizes.context, threads=sizes.threads
    )
    longest = sorted(bodies, key=lambda body: -int(body["max_tokens"]))
    with (
        tempfile.TemporaryDirectory() as folder,
        running(contestant, Path(folder) / "llama.log") as url,
    ):
        _complete(url, {**bodies[0], "max_tokens": 4})
        began = time.perf_counter()
        with ThreadPoolExecutor(sizes.seats) as users:
            counts = list(users.map(lambda body: _complete(url, body), longest))
        seconds = time.perf_counter() - began
    return {
        "rows": len(bodies),
        "seconds": seconds,
        "output_tokens": sum(counts),
        "output_tokens_per_second": sum(counts) / seconds,
        "requests_per_second": len(bodies) / seconds,
    }


def _complete(url: str, body: dict[str, Any]) -> int:
    """Tokens of one answer."""
    asked = {
        **{"prompt": body["prompt"], "n_predict": body["max_tokens"], "ignore_eos": True},
        **{"temperature": 0, "cache_prompt": False, "stream": False},
    }
    connection = http.client.HTTPConnection(str(urlsplit(url).netloc), timeout=_TIMEOUT)
    try:
        connection.request(
            "POST", "/completion", json.dumps(asked), {"content-type": "application/json"}
        )
        answer = connection.getresponse()
        said = answer.read()
    except OSError as error:
        raise TilewrightError(f"llama.cpp: {error}") from None
    finally:
        connection.close()
    if answer.status != 200:
        raise TilewrightError(f"llama.cpp: {said[:300].decode(errors='replace')}")
    return int(json.loads(said)["tokens_predicted"])
