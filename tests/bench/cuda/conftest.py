"""What the scripts that measure kernels do where they are asked for what there is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

Main = Callable[[Sequence[str]], int]
CheckMistake = Callable[[Main, str, str], None]


@pytest.fixture
def check_mistake(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> CheckMistake:
    """Run a script on words, as where there is no GPU: exit code 2, and one line, which says why,
    on standard error.
    """

    def check(main: Main, words: str, said: str) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert main(words.split()) == 2
        printed = capsys.readouterr()
        assert said in printed.err and printed.err.count("\n") == 1 and printed.out == ""

    return check
