"""Many windows of our texts, each with an fp32 reference of its own.

A window is what an accuracy run goes over: 512 tokens are prefilled, 512 predictions counted. Knows
nothing of how runs are recorded or compared (target_runs).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tilewright.compiler.targets.interface.base import Executable
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, ACCURACY_PREFILL
from tilewright.evaluate.cases.prompts import bench_text
from tilewright.evaluate.cases.reference import Subject, build_reference, text_hash
from tilewright.evaluate.measure.accuracy import Truth

TEXTS = ("accuracy.txt", "held_out.txt", "long.txt")
"""What windows are cut from, one behind the other."""

NUM_COUNTED = ACCURACY_CONTEXT - ACCURACY_PREFILL
"""Predictions of a window, and the distance from one window's start to the next's: so no token is
predicted twice, and the prefilled half of a window is what the one before it was counted on.
"""


def cut_windows(encode: Callable[[str], list[int]], num_windows: int) -> list[tuple[int, ...]]:
    """The ids of the first windows; the first of all is the one of the accuracy case.

    Raises:
        ConfigError: when the texts have fewer windows with this tokenizer.
    """
    tokens = [token for name in TEXTS for token in encode(bench_text(name))]
    most = (len(tokens) - ACCURACY_PREFILL) // NUM_COUNTED
    if not 1 <= num_windows <= most:
        raise ConfigError(
            f"{num_windows} windows; allowed: 1 to {most}, for the texts have {len(tokens)} tokens "
            "here"
        )
    starts = range(0, num_windows * NUM_COUNTED, NUM_COUNTED)
    return [tuple(tokens[start : start + ACCURACY_CONTEXT]) for start in starts]


def windows_hash(windows: Sequence[Sequence[int]]) -> str:
    """Identity of the ids of all windows, in their order."""
    return text_hash([token for window in windows for token in window])


def build_windows(
    executable: Executable,
    subject: Subject,
    windows: Sequence[Sequence[int]],
    *,
    on_window: Callable[[int, int], None] = lambda done, total: None,
) -> list[Truth]:
    """The fp32 model on every window; all logits are held, 4 bytes x 512 x vocabulary each.

    ``executable``: of the reference target, in fp32. ``subject``: its text hash is not read.
    """
    found: list[Truth] = []
    for index, tokens in enumerate(windows):
        of = dataclasses.replace(subject, text_hash=text_hash(tokens))
        found.append(build_reference(executable, of, tokens))
        on_window(index + 1, len(windows))
    return found
