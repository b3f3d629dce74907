"""What stands beside what when replicas are measured, and the table of it."""

from __future__ import annotations

from bench.serving.replicas import _Options, _places, render


def test_a_cpu_has_a_share_of_its_threads_all_of_them_and_replicas() -> None:
    found = _places(_Options(threads=4, users=8))
    assert [(each.contestant.name, each.users) for each in found] == [
        ("one, 2 threads", 8),
        ("one, 4 threads", 16),
        ("2 replicas", 16),
    ]
    commands = [" ".join(each.contestant.command) for each in found]
    assert commands[1].endswith("--max-seats 16 --threads 4")
    assert commands[2].endswith("--max-seats 8 --replicas 2 --threads 4")


def test_gpus_have_one_and_as_many_as_replicas() -> None:
    found = _places(_Options(target="cuda", replicas=3, users=64))
    assert [each.users for each in found] == [64, 192]
    assert found[1].contestant.command[-2:] == ("--replicas", "3")


def test_the_first_of_each_style_is_what_others_are_compared_with() -> None:
    def row(server: str, style: str, rate: float) -> dict[str, object]:
        times = {"ttft_ms_p50": 5.0, "tpot_ms_p50": 2.0}
        return {
            "server": server,
            "style": style,
            "users": 4,
            "output_tokens_per_second": rate,
            **times,
        }

    styles = {"stream": (100.0, 190.0), "whole": (200.0, 398.0)}
    rows = [
        row(server, style, rate)
        for style, rates in styles.items()
        for server, rate in zip(("one", "2 replicas"), rates, strict=True)
    ]
    lines = render(rows).splitlines()[2:]
    assert [line.split("|")[-2].strip() for line in lines] == [
        "1.00 x",
        "1.90 x",
        "1.00 x",
        "1.99 x",
    ]
