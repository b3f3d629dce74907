"""What `--explain` says of a rank's program: who has what, and what a step sends."""

from __future__ import annotations

import io

from rich.console import Console

from tests.dealt_models import grouped, make
from tilewright.cli.measure.explain import explain_cost, explain_places
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.distributed.parallel import SINGLE_RANK, ParallelConfig


def explained(compiled: Compiled) -> str:
    screen = Console(file=io.StringIO(), width=120)
    explain_places(screen, compiled)
    explain_cost(screen, compiled, 16)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(" ".join(line.replace("│", " ").split()) for line in text.splitlines())


def test_shares_wire_and_bytes_are_told() -> None:
    model = make()
    text = explained(grouped(model, ParallelConfig(3, wire="bf16")))
    for line in (
        "wqkv out 64 + 32 + 32",
        "wo in 64 + 32 + 32",
        "ff1_3 out 3 x 24",
        "ff2 in 3 x 24",
        "lm_head out 48 + 48 + 35",
    ):
        assert line in text
    sent = 2 * (2 * model.config.num_layers * model.config.hidden_size * 2 + 48 * 4) / 1024
    (row,) = [line for line in text.splitlines() if line.startswith("collective")]
    assert row.split()[1] == "bf16"
    assert row.split()[-1] == f"{sent:,.1f}"


def test_one_device_has_no_such_lines() -> None:
    text = explained(grouped(make(), SINGLE_RANK))
    assert "ranks" not in text
    assert "sent" not in text
