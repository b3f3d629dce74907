"""The generated block: which result a row comes from, what cells say, and that it reads back."""

from __future__ import annotations

from typing import Any

from tests.evaluate.report.perf_records import HEADINGS, accuracy, make, measured_accuracy, rows
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.perf_tables import SEVERAL_USERS, plan_tables, render_results
from tilewright.evaluate.results.record import (
    KINDS,
    ContractLine,
    Paired,
    Repeat,
    medians,
)
from tilewright.evaluate.results.selection import unplaced


def test_a_row_has_speed_and_accuracy_of_their_own_measurements() -> None:
    paired = Paired.from_counts("bf16", b=20, c=8)
    exact = accuracy(kl_mean=0.012345, paired=paired)
    (row,) = rows([measured_accuracy(accuracy=exact), make()], "performance")
    assert (row.model, row.device, row.dp) == ("SmolLM2-135M-Instruct", "CPU", 1)
    assert (row.top1, row.top5, row.speed, row.ttft) == (91.8, 98.6, 120.0, 100.0)
    assert row.cells["Positions"] == "512"
    assert row.cells["KL"] == "0.0123"
    assert row.cells["vs base"] == "bf16 +8 -20 p=0.036"
    assert row.cells["Top-1 95 % CI"] == "89.1-93.9"
    assert (row.cells["Spread (%)"], row.cells["Peak (MB)"]) == ("1.2", "450")


def test_a_row_says_where_its_figures_come_from() -> None:
    repeats = [Repeat(ttft_ms=t, decode_tsu=s) for t, s in ((90, 99), (100, 100), (110, 101))]
    command = "tilewright bench --prompt 'a|b'"
    full = {"commit": "0123456789abcdef-dirty", "command": command, "mesh": "1x2", "dp": 2}
    speed = make(day=2, repeats=repeats, **full, **medians(repeats))
    (row,) = rows([speed], "performance")
    assert row.cells["Speed 95 % CI"] == "97.5-102.5", "4.303 / sqrt(3), both ways"
    assert (row.cells["Spread (%)"], row.cells["TTFT spread (%)"]) == ("2.0", "20.0")
    assert row.cells["Date"] == "2026-01-02 \u2021" and row.cells["Commit"] == "0123456789-dirty"
    assert row.cells["Machine"] == "a processor / 2 threads, 4 devices"
    assert row.cells["Command"] == "tilewright bench --prompt 'a/b'"
    (row,) = rows([make(device="H200", target="cuda", device_detail="a GPU")], "performance")
    assert row.cells["Machine"] == "a GPU, 1 device"
    (row,) = rows([make(device_detail="a processor, 1 threads")], "performance")
    assert row.cells["Machine"] == "a processor, 1 thread"
    native = {"device": "CPU native", "target": "cpu-native"}
    (row,) = rows([make(**native, device_detail="a processor, AVX2, 2 threads")], "performance")
    assert row.cells["Machine"] == "a processor, AVX2, 2 threads"
    (row,) = rows([make()], "performance")  # a record from before these were kept
    assert (row.cells["Commit"], row.cells["Command"]) == ("-", "-")
    assert row.cells["Speed 95 % CI"] == "" == row.cells["TTFT spread (%)"]


def test_rows_of_other_runs_are_marked() -> None:
    """By code, machine and hour; speed and accuracy alike; each device has its own run."""
    long = {"prompt_length": 2048, "commit": "a"}
    at = "2026-01-01T{}:00+00:00".format
    found = [
        make("performance", **long, timestamp=at("08:00")),
        make("accuracy", **long, timestamp=at("08:50")),
        make("all-bfp8", **long, timestamp=at("09:40")),
        make("mine", **long, timestamp=at("10:50")),
    ]
    other = make(**{**long, "commit": "b"}, device="H200", target="cuda", timestamp=at("09:00"))
    printed = rows([*found, other], "long_context", context_k=2)
    marked = {(r.device, r.precision) for r in printed if r.cells["Date"].endswith(" \u2020")}
    assert len(printed) == 5 and marked == {("CPU", "mine")}
    both = render_results([make(commit="a"), measured_accuracy(commit="b-dirty")])
    assert "2026-01-01; 2026-01-02 \u2020 \u2021 |" in both or "2026-01-01 \u2020 \u2021 |" in both


def test_percentages_are_rounded_not_lifted() -> None:
    shown = accuracy(461)  # 90.04 %
    (row,) = rows([measured_accuracy(accuracy=shown)], "performance")
    assert row.cells["Top-1 (%)"] == "90.0"
    assert row.speed is None
    assert row.ttft is None


def test_an_accuracy_on_another_text_never_enters_a_table() -> None:
    """Nor does it replace the one that does, or hide the speed measured beside it."""
    standard = measured_accuracy()
    other = measured_accuracy(day=2, accuracy=accuracy(300, text="held-out"))
    for results in ([standard, other], [other, standard]):
        (row,) = rows(results, "performance")
        assert row.top1 == 91.8
    assert unplaced([standard, other]) == [other]
    (row,) = rows([make(accuracy=accuracy(300, text="held-out"))], "performance")
    assert (row.top1, row.speed) == (None, 120.0)


def test_a_sweep_s_accuracy_is_one_and_its_speed_is_none() -> None:
    lone = {"case": "performance-top-1", "num_generated": 1, "ttft_ms": 900.0, "spread": None}
    (row,) = rows([measured_accuracy(**lone)], "performance")
    assert (row.top1, row.speed, row.ttft) == (91.8, None, None)
    (row,) = rows([measured_accuracy(day=2, **lone), make()], "performance")
    assert (row.top1, row.speed, row.ttft) == (91.8, 120.0, 100.0)
    text = render_results([measured_accuracy(**lone)])
    assert "900.0" not in text and "Long-context" not in text


def test_the_newest_result_counts_whatever_the_order() -> None:
    old, new = make(day=1, decode_tsu=1.0), make(day=2, decode_tsu=2.0)
    for results in ([old, new], [new, old]):
        (row,) = rows(results, "performance")
        assert row.speed == 2.0
    # Times in different zones are compared as times, and of equal ones the last written counts.
    later = make(timestamp="2026-01-01T23:00:00-05:00", decode_tsu=3.0)
    (row,) = rows([later, new], "performance")
    assert row.speed == 3.0
    (row,) = rows([make(decode_tsu=5.0), make(decode_tsu=4.0)], "performance")
    assert row.speed == 4.0


def test_a_foreign_record_replaces_no_figure() -> None:
    """Of another machine, of other threads, or of tokens that were sampled."""
    home = [make(name, decode_tsu=46.4, host="a") for name in ("performance", "accuracy")]
    (row,) = rows([*home, make(day=2, decode_tsu=1.0, sampling="temperature 1")], "performance")
    assert row.speed == 46.4
    for changes, device in (
        ({"host": "b" * 12}, "CPU [a processor 2 threads, host bbbbbb]"),
        ({"host": "a", "device_detail": "a processor, 1 threads"}, "CPU [a processor, 1 threads]"),
    ):
        foreign = make(day=2, decode_tsu=1.0, effective_id="other", **changes)
        for results in ([*home, foreign], [foreign, *home]):
            found = {row.device: row.speed for row in rows(results, "performance")}
            assert found == {"CPU": 46.4, device: 1.0}
            (row,) = rows(results, "accuracy")
            assert (row.device, row.speed) == ("CPU", 46.4)


def test_a_machine_that_measured_all_rows_again_takes_the_name() -> None:
    old = [make(name, host="a", decode_tsu=1.0) for name in ("performance", "accuracy")]
    new = [make(name, host="b", decode_tsu=2.0, day=2) for name in ("performance", "accuracy")]
    found = {row.device: row.speed for row in rows([*new, *old], "performance")}
    assert found == {"CPU": 2.0, "CPU [a processor 2 threads, host a]": 1.0}


def test_an_accuracy_is_of_no_machine() -> None:
    (row,) = rows([make(host="a"), measured_accuracy(host="b")], "performance")
    assert (row.device, row.top1, row.speed) == ("CPU", 91.8, 120.0)


def test_a_speed_run_does_not_hide_an_accuracy_of_the_same_lengths() -> None:
    both = make(accuracy=accuracy(), decode_tsu=1.0)
    (row,) = rows([both, make(day=2)], "performance")
    assert (row.top1, row.speed) == (91.8, 120.0)


def test_results_of_a_replaced_checkpoint_or_definition_are_gone() -> None:
    stale = measured_accuracy(day=1, model_hash="h0")
    (row,) = rows([stale, make(day=2)], "performance")
    assert row.top1 is None
    stale = measured_accuracy(day=1, precision_id="old", effective_id="old")
    (row,) = rows([stale, make(day=2)], "performance")
    assert row.top1 is None
    old = make(prompt_length=2048, precision_id="old", effective_id="old")
    assert rows([old, make(day=2)], "long_context", context_k=2) == ()


def test_every_configuration_at_batch_1_has_its_heading() -> None:
    results = [make(name) for name in HEADINGS]
    document = perf_md.parse(render_results(results))
    found = {s.title: len(s.rows) for s in document.sections if s.kind == "precision"}
    assert found == dict.fromkeys(HEADINGS.values(), 1)
    titles = [section.title for section in document.sections]
    assert titles[:3] == ["Performance", "Accuracy", "Environment"]
    assert titles[3] == "Model precision and math fidelity"


def test_long_context_and_batch_32() -> None:
    users: dict[str, Any] = {
        "ttft_first_ms": 1.0,
        "ttft_median_ms": 2.0,
        "ttft_last_ms": 3.0,
        "tps": 640.0,
    }
    results = [
        make(prompt_length=2048),
        make(prompt_length=65536, decode_tsu=7.0),
        make("all-bfp8", batch=32, **users),
        make(batch=32),
    ]
    document = perf_md.parse(render_results(results))
    titles = [section.title for section in document.sections]
    assert titles[:2] == ["Long-context (64K Tokens)", "Long-context (2K Tokens)"]
    section = document.find("batch_32")
    assert section is not None
    assert [row.precision for row in section.rows] == ["all-bfp8", "performance"]
    row = section.rows[0]
    assert row.ttft == 100.0
    assert row.cells["avg TTFT (ms)"] == "100.0"
    assert row.cells["last TTFT (ms)"] == "3.0"
    assert row.cells["Total (t/s)"] == "640.0"
    assert document.find("performance") is None


def test_other_numbers_of_users_share_a_table() -> None:
    """Of each configuration by the prompts' length and the users, the newest of each."""
    results = [
        make(batch=64, tps=640.0, day=1),
        make(batch=64, tps=650.0, day=2),
        make(batch=8, tps=80.0),
        make(batch=4, prompt_length=1024, tps=40.0),
        make("all-bfp8", batch=256, tps=2560.0),
        make(batch=32),
    ]
    (plan,) = [each for each in plan_tables(results) if each.title == SEVERAL_USERS]
    assert plan.table is not None
    names = "Precision", "Batch x prompt", "Total (t/s)"
    at = [plan.table.columns.index(name) for name in names]
    assert [tuple(line[i] for i in at) for line in plan.table.rows] == [
        ("all-bfp8", "256 x 128", "2560.0"),
        ("performance", "8 x 128", "80.0"),
        ("performance", "64 x 128", "650.0"),
        ("performance", "4 x 1024", "40.0"),
    ]


def test_results_that_fit_no_table_are_told_apart() -> None:
    outside = [
        make(target="reference"),
        make(target="null"),
        make(compute="exact"),
        make(prompt_length=100),
        make(num_generated=500),
        make(prompt_length=2047),
        make(batch=4, prompt_length=100),
        make(decode_tsu=None, ttft_ms=None),
        make(batch=32, num_generated=1, accuracy=accuracy()),
    ]
    inside = [make(), make(batch=32), make(prompt_length=1024), measured_accuracy()]
    inside += [make(batch=4), make(batch=32, prompt_length=2048)]
    assert unplaced(outside + inside) == outside
    assert "No results yet." in render_results(outside)
    assert "No results yet." in render_results([])


def test_random_weights_stand_apart_and_last() -> None:
    results = [make(model="A", weights="random"), make()]
    first, last = rows(results, "performance")
    assert (first.random, last.random, last.model) == (False, True, "A")
    assert last.cells["Model"] == "A (random weights)"
    assert perf_md.match_row([first, last], "A", "CPU") is None


def test_kinds_of_results_never_share_a_table() -> None:
    results = [
        make(kind=kind, decode_tsu=float(i), device=f"D{i}", target="elsewhere", mesh="1x8")
        for i, kind in enumerate(KINDS)
    ]
    for i, kind in enumerate(KINDS):
        (row,) = rows(results, "performance", result_kind=kind)
        assert (row.speed, row.device, row.mesh) == (float(i), f"D{i}", "1x8")


def test_replicas_and_meshes_are_in_the_device_cell() -> None:
    results = [
        make(device="H200", target="cuda", mesh=m, dp=d) for m, d in (("1x1", 4), ("1x2", 2))
    ]
    found = rows(results, "performance")
    assert [row.cells["Device"] for row in found] == ["H200 (DP=4)", "H200 (1x2) (DP=2)"]
    assert [(row.device, row.mesh, row.dp) for row in found] == [
        ("H200", None, 4),
        ("H200", "1x2", 2),
    ]


def test_the_contract_of_a_target_is_printed_once() -> None:
    lines = (
        ContractLine("kv_cache", "bfp8", "not honoured", "fp32"),
        ContractLine("ff2 | x", "bfp8", "honoured", "bfp8", "0-3"),
    )
    results = [make(contract=lines), make("all-bfp8", contract=lines[:1])]
    text = render_results(results)
    assert text.count("## Numeric contract (cpu)") == 1
    assert text.count("| kv_cache") == 1
    assert "| ff2 / x " in text


def test_only_printed_results_have_their_environment_printed() -> None:
    results = [make(commit="old"), make(day=2, commit="new")]
    text = render_results(results)
    assert "| new " in text
    assert "| old " not in text
    assert "onnxruntime 1, torch 2" in text


def test_calibrated_rows_stand_beside_the_published_ones_in_their_own_column() -> None:
    plain, gptq = make(), make(day=2, calibration="gptq, 32,768 tokens (1a2b3c4d)")
    newer = make(day=3, calibration=gptq.calibration, decode_tsu=99.0)
    text = render_results([plain, measured_accuracy(), gptq, newer])
    section = perf_md.parse(text).find("performance")
    assert section is not None and "`Calibration` is the method" in text
    assert [row.calibration for row in section.rows] == ["", gptq.calibration]
    assert [row.speed for row in section.rows] == [120.0, 99.0], "the newest of each"
    name, device = section.rows[0].model, section.rows[0].device
    found = perf_md.match_row(section.rows, name, device)
    assert found == section.rows[0], "a published row is never the calibrated one"
    assert "Calibration" not in render_results([plain, measured_accuracy()])
