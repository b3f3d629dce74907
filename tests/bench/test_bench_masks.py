"""What masks cost the host: that the pretended device serves both kinds of answers."""

from __future__ import annotations

from pathlib import Path

from bench.masks import PacedExecutable, measure
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer


def test_free_answers_are_timed_beside_bound_ones(tmp_path: Path) -> None:
    byte_tokenizer(300, "pretended").save(tmp_path)
    executable = PacedExecutable(300, 4, step_s=0.0005, launch_s=0.0)
    found = measure(executable, tmp_path, bound=2, tokens=300)
    assert (found.free, found.bound) == (2, 2) and found.num_met > 0
    assert found.per_token_s >= 0.0004 and 0 <= found.idle < 1
