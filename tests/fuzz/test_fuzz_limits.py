"""The guards complain about what they are there for."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fuzz import limits
from tests.fuzz.campaign import Campaign
from tests.fuzz.limits import guarded, guarded_apart
from tilewright.errors import ConfigError


def fail_with(message: str) -> Callable[[], None]:
    def read() -> None:
        raise ConfigError(message)

    return read


def crash() -> None:
    raise KeyError("x")


def spin() -> None:
    while True:
        pass


def wait() -> None:
    time.sleep(600)


GUARDS = [guarded, guarded_apart]


@pytest.mark.parametrize("guard", GUARDS)
def test_messages_come_back(guard: Callable[..., str]) -> None:
    assert guard(fail_with("a b"), file_size=0) == "a b"
    assert guard(lambda: None, file_size=0) == ""
    for message in ("a\nb", "\x1b[31m", "x" * 10_000):
        with pytest.raises(AssertionError):
            guard(fail_with(message), file_size=0)


def test_other_errors_and_hangs_and_numpy_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError):
        guarded(crash, file_size=0)
    with pytest.raises(AssertionError, match=r"more than 0\.2 seconds \(SIGPROF"):
        guarded(spin, file_size=0, seconds=0.2)
    monkeypatch.setattr(limits, "WAITING", 1)
    with pytest.raises(AssertionError, match=r"more than 0\.1 seconds \(SIGALRM"):
        guarded(wait, file_size=0, seconds=0.1)
    with pytest.raises(AssertionError, match="bytes for a file"):
        guarded(lambda: np.ones(10**7), file_size=1000)


@pytest.mark.parametrize("read", [crash, spin, wait, lambda: torch.ones(10**9)])
def test_apart_native_memory_is_seen_too(
    read: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAITING", 1 if read is wait else 60)
    with pytest.raises(AssertionError, match="the reader ended with"):
        guarded_apart(read, file_size=1000, seconds=0.3)


def test_a_campaign_counts_defects_by_reader_and_continues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fragile(seed: int) -> bool:
        return bool(1 / (seed - 3))

    campaign = Campaign({"sound": lambda seed: seed % 2 == 0, "fragile": fragile})
    campaign.run(range(1, 9))
    assert campaign.counts == {"sound": 8, "fragile": 8}
    assert campaign.refused == {"sound": 4, "fragile": 7}
    assert campaign.defects == {"sound": 0, "fragile": 1}
    assert "defect: fragile, seed 3: ZeroDivisionError" in capsys.readouterr().out
    assert "| fragile | 8 | 7 | 1 |" in campaign.table()
