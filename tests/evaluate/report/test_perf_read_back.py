"""Whatever results there are: what is rendered of them reads back, and the newest are there."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.report.perf_records import HEADINGS, make
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.markdown import merge
from tilewright.evaluate.report.perf_tables import plan_tables, render_results
from tilewright.evaluate.results.record import KINDS, Accuracy, ContractLine, Paired, Result
from tilewright.evaluate.results.selection import unplaced

shapes = st.characters(categories="LMNPS", include_characters=" ", exclude_characters="|()")
plain = st.text(shapes, min_size=1, max_size=8).filter(lambda text: text == text.strip())
values = st.none() | st.floats(0, 1e9)


@st.composite
def any_results(draw: st.DrawFn) -> list[Result]:
    models = draw(st.lists(plain, min_size=1, max_size=2, unique=True))
    results = []
    for _ in range(draw(st.integers(0, 8))):
        top = sorted(draw(st.tuples(*[st.integers(1, 1000)] * 3)))
        found = Accuracy.from_counts(
            "r",
            num_top1=top[0],
            num_top5=top[1],
            num_positions=top[2],
            kl_mean=draw(st.none() | st.floats(-1e-9, 1e9)),
            paired=draw(
                st.none() | st.builds(Paired, plain, b=st.just(1), c=st.just(2), p=st.floats(0, 1))
            ),
        )
        result = make(
            draw(st.sampled_from(sorted(HEADINGS))),
            day=draw(st.integers(1, 28)),
            model=draw(st.sampled_from(models)),
            weights=draw(st.sampled_from(["checkpoint", "random"])),
            device=draw(st.sampled_from(["CPU", "TG"])),
            dp=draw(st.sampled_from([1, 4])),
            mesh=draw(st.sampled_from(["1x1", "1x2"])),
            batch=draw(st.sampled_from([1, 32])),
            prompt_length=draw(st.sampled_from([128, 2048, 100])),
            kind=draw(st.sampled_from(KINDS)),
            decode_tsu=draw(values),
            ttft_ms=draw(values),
            tps=draw(values),
            accuracy=draw(st.sampled_from([None, found])),
            contract=(ContractLine(draw(plain), draw(st.text(max_size=5)), "s", "e"),),
        )
        same = draw(st.sampled_from([result.effective_id, "shared"]))
        results.append(dataclasses.replace(result, effective_id=same))
    return results


@given(any_results())
def test_what_is_rendered_reads_back(results: list[Result]) -> None:
    text = merge("# Mine\n", "results", render_results(results))
    document = perf_md.parse(text)
    plans = [plan for plan in plan_tables(results) if plan.level == 2]
    read = [section for section in document.sections if section.level == 2]
    assert [section.title for section in read] == [plan.title for plan in plans]
    for plan, section in zip(plans, read, strict=True):
        is_typed = not plan.title.startswith(("Numeric contract", "Environment", "Several users"))
        assert (section.kind != "other") == is_typed
        if is_typed:
            cells = [tuple(row.cells.values()) for row in section.rows]
            # without a table all of its results stand in rows of another precision
            assert cells == ([] if plan.table is None else list(plan.table.rows))
            columns = () if plan.table is None else plan.table.columns
            assert all(tuple(row.cells) == columns for row in section.rows)


@given(any_results())
def test_every_placed_result_or_a_newer_one_has_a_row(results: list[Result]) -> None:
    document = perf_md.parse(render_results(results))
    for kind in KINDS:
        wanted = [
            result
            for result in results
            if result.kind == kind and result.batch == 1 and result.prompt_length == 2048
            if result.decode_tsu is not None or result.ttft_ms is not None
        ]
        section = document.find("long_context", context_k=2, result_kind=kind)
        printed = {(r.model, r.random, r.device, r.dp) for r in section.rows} if section else set()
        assert printed <= {(r.model, r.weights == "random", r.device, r.dp) for r in wanted}
        if wanted:
            placed = [r for r in results if r not in unplaced(results) and r.kind == kind]
            latest = max(r.when for r in wanted)
            assert printed or any(r.when >= latest for r in placed if r not in wanted)
