"""What measures passes that rows and prompts share, on a device that takes 2 ms a step."""

from __future__ import annotations

import pytest

from bench.cuda import shared_pass
from bench.cuda.shared_pass import Options, main, measure, show
from tests.runtime.queued import QueuedExecutable
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.targets.step import Chunk


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
    assert [each[:2] for each in found] == [(1, 5), (2, 5)]
    assert [each[2] for each in found] == [pytest.approx([2.0, 2.0])] * 2
    assert made.num_open == 0
    assert {len(each.decode) for each in made.given if each.prompts[:1] and each.decode} == {1, 2}
    with pytest.raises(ConfigError, match="pages are needed; allowed: 64"):
        measure(executable(), Options(rows=(2,), tokens=(5,), context=200, passes=2))
    with pytest.raises(ConfigError, match="share no pass; allowed: "):
        measure(executable(passes=()), options)


def test_the_table_and_what_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    head, _, line = show([(64, 720, [20.0, 22.0, 21.0])]).splitlines()
    assert "tokens and rows a ms" in head
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["64", "720", "21.00", "20.00", "22.00", "37.3"]
    for words, said in (("--model shape:tiny --target cpu", "share no pass"), ("--rows 0", "'0'")):
        assert main(words.split()) == 2
        assert said in capsys.readouterr().err
