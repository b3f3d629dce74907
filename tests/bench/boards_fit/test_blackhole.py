"""The time model of Blackhole boards against published rows."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.boards_fit.blackhole import PROMPT_NAMES, ROWS, group_errors, study_blackhole
from tests.targets.tenstorrent.boards import programs
from tests.targets.tenstorrent.test_modern_models import MODELS
from tests.tiny import tiny_model
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.tenstorrent.perf.blackhole import (
    BLACKHOLE,
    BLACKHOLE_BARS,
    SOFTWARE,
    TRACED,
    blackhole_seconds,
    call_seconds,
    is_host_bound,
    prompt_seconds,
    software_of,
)
from tilewright.compiler.targets.tenstorrent.perf.estimate import estimate, step_seconds
from tilewright.compiler.targets.tenstorrent.perf.work import (
    COLLECTIVE,
    MATMUL,
    program_work,
)


@pytest.mark.slow
def test_left_out_rows_are_within_the_bounds() -> None:
    study = study_blackhole()
    steps, prompts = (
        100 * np.abs([item.error for item in left]) for left in (study.steps, study.prompts)
    )
    assert np.median(steps) <= 3 and steps.max() <= 16
    assert np.median(prompts) <= 5.5 and round(prompts.max(), 1) <= 20
    steps, prompts = (100 * np.abs(group_errors(left)) for left in (study.steps, study.prompts))
    assert len(steps) == 30 and np.median(steps) <= 5.5 and steps.max() <= 17
    assert len(prompts) == 26 and np.median(prompts) <= 6 and round(prompts.max(), 1) <= 20
    assert study.bars() == pytest.approx(BLACKHOLE_BARS, rel=0.01)
    for name in (*SOFTWARE, *PROMPT_NAMES):
        assert getattr(study.constants, name) == pytest.approx(getattr(BLACKHOLE, name), rel=0.01)


def test_every_published_row_has_a_date_a_source_and_known_software() -> None:
    rows = json.loads(ROWS.read_text(encoding="utf-8"))["rows"]
    assert len({row["id"] for row in rows}) == len(rows) > 60
    assert all(row["date"] and row["source"] and row["step_ms"] > 0 for row in rows)
    assert {row["software"] for row in rows} == set(SOFTWARE)


def test_two_readers_of_a_bank_halve_the_cycles_of_a_matmul() -> None:
    _, decode = programs(tiny_model(hidden_size=64), name="p150")
    work = next(each for each in program_work(decode) if each.is_one_row)
    times = [blackhole_seconds(work, BLACKHOLE, name) for name in ("tt_2025_11", "tt_2026_09")]
    assert times[0][2] == 2 * times[1][2] and times[0][1] == times[1][1]
    assert software_of(decode) == "tt_2026_09"
    assert step_seconds(decode) == pytest.approx(sum(each.seconds for each in estimate(decode)))
    slower = replace(decode, device="P100")
    assert step_seconds(slower) == step_seconds(decode), "the banks are those of the program"


def test_an_untraced_prompt_takes_the_time_of_the_host_or_of_the_chips() -> None:
    prompt, _ = programs(tiny_model(hidden_size=64), name="p150")
    name, work = SOFTWARE[software_of(prompt)].prompts, program_work(prompt)
    parts = [prompt_seconds(cost, BLACKHOLE, name) for cost in work]
    host, chips = sum(part[0] for part in parts), sum(max(part[1:]) for part in parts)
    assert name != TRACED and host > chips
    call = call_seconds(BLACKHOLE, name, prompt.batch)
    assert step_seconds(prompt) == pytest.approx(call + host)
    assert call == 32 * call_seconds(BLACKHOLE, name, 32) and not call_seconds(BLACKHOLE, TRACED, 1)
    assert {line.bound for line in estimate(prompt)[:-1]} == {"start"}
    slow = tuple(replace(cost, bytes_read=10**9, activation_bytes=10**9) for cost in work)
    assert is_host_bound(((cost, 1.0) for cost in work), BLACKHOLE, name)
    assert not is_host_bound(((cost, 1.0) for cost in slow), BLACKHOLE, name)


def test_a_traced_prompt_pays_the_operator_start_of_decode_steps() -> None:
    prompt, _ = programs(tiny_model(hidden_size=64), Mesh(2), name="p300")
    software, work = software_of(prompt), program_work(prompt)
    assert SOFTWARE[software].prompts == TRACED
    work = tuple(cost for cost in work if cost.kind != COLLECTIVE)
    parts = [prompt_seconds(cost, BLACKHOLE, TRACED, software=software) for cost in work]
    count = sum(cost.starts + cost.has_bias for cost in work)
    start = BLACKHOLE.traced_prompt + getattr(BLACKHOLE, software)
    assert sum(part[0] for part in parts) == pytest.approx(count * start)
    untraced = [prompt_seconds(cost, BLACKHOLE, "tt_prompt") for cost in work]
    assert [part[1:] for part in parts] == [part[1:] for part in untraced]


def test_prompts_of_a_delta_rule_use_ten_rows_of_cores() -> None:
    hybrid = tiny_model(**{**MODELS["qwen3_5"], "num_layers": 2})
    prompt, _ = programs(hybrid, options=CompileOptions(max_context=288), name="p150")
    assert prompt.length == 288, "nine tiles of rows"
    boards = prompt, replace(prompt, device="N150")
    ten, eight = (
        [
            work.products
            for work in program_work(each)
            if work.kind == MATMUL and not work.is_one_row
        ]
        for each in boards
    )
    assert ten and eight == [2 * products for products in ten]
