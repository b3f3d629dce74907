"""What measures passes that rows and prompts share, on a device that takes 2 ms a step."""

from __future__ import annotations

import pytest

from bench.cuda import shared_pass
from bench.cuda.shared_pass import Kind, Options, main, measure, show
from tests.runtime.queued import QueuedExecutable
from tilewright.compiler.targets.interface.step import Chunk
from tilewright.errors import ConfigError


class Rewound(QueuedExecutable):
    """A piece comes again and again."""

    def _prompt(self, chunk: Chunk) -> None:
        self._seats[chunk.seat].length = chunk.start
        super()._prompt(chunk)


def executable(**capabilities: object) -> Rewound:
    limits = {"page_size": 4, "num_pages": 64, "max_context": 64, "passes": ((4, (8,)),)}
    made = Rewound(**{**limits, **capabilities})
    made.step_seconds = 2e-3
    return made


def test_every_pass_is_one_of_rows_and_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    made = executable()
    monkeypatch.setattr(shared_pass.time, "perf_counter", made.clock)
    options = Options(rows=(1, 2), tokens=(5,), context=9, start=3, passes=2)
    found = measure(made, options)
    assert [kind for kind, _ in found] == [Kind(1, 1, 5), Kind(2, 1, 5)]
    assert [taken for _, taken in found] == [pytest.approx([2.0, 2.0])] * 2
    assert made.num_open == 0
    assert {len(each.decode) for each in made.given if each.prompts[:1] and each.decode} == {1, 2}
    with pytest.raises(ConfigError, match="pages are needed; allowed: 64"):
        measure(executable(), Options(rows=(2,), tokens=(5,), context=200, passes=2))
    with pytest.raises(ConfigError, match="share no pass; allowed: "):
        measure(executable(passes=()), options)


def test_several_pieces_share_a_pass_beside_rows_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By themselves they all choose, so that there is something to wait for."""
    made = executable(max_seats=5, max_prompts=3, most_shared=24)
    monkeypatch.setattr(shared_pass.time, "perf_counter", made.clock)
    options = Options(rows=(0, 2), pieces=(1, 3), tokens=(5,), context=9, passes=2)
    found = measure(made, options)
    kinds = [Kind(0, 1, 5), Kind(0, 3, 5), Kind(2, 1, 5), Kind(2, 3, 5)]
    assert [kind for kind, _ in found] == kinds
    assert [taken for _, taken in found] == [pytest.approx([2.0, 2.0])] * 4
    steps = [each for each in made.given if each.prompts and each.prompts[0].start == 0]
    shared = {(len(s.decode), len(s.prompts)) for s in steps if len(s.prompts[0].tokens) == 5}
    assert shared == {(kind.rows, kind.pieces) for kind in kinds}
    seen = {each.prompts[0].seat: each.prompts[0].tokens for each in steps}
    assert len(set(seen.values())) == len(seen), "each has tokens of its own"
    for limits in ({"max_prompts": 3, "most_shared": 23}, {"max_prompts": 2, "most_shared": 24}):
        few = executable(max_seats=3, **limits)
        with pytest.raises(ConfigError, match="0 rows and 3 pieces of 5 tokens share no pass"):
            measure(few, Options(rows=(0,), pieces=(3,), tokens=(5,), passes=2))


def test_the_table_and_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    head, _, line = show([(Kind(64, 2, 360), [20.0, 22.0, 21.0])]).splitlines()
    assert "tokens and rows a ms" in head
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["64", "2", "360", "21.00", "20.00", "22.00", "10.50", "37.3"]
    for words, said in (
        ("--model shape:tiny --target cpu", "share no pass"),
        ("--pieces 0", "'0'"),
    ):
        assert main(words.split()) == 2
        assert said in capsys.readouterr().err
