"""Recorded comparison tables in documents, between markers ``<!-- BLOCK:begin NAME -->``.

- ``peers NAME PART``: a part of ``results/NAME.json``, a run of ``python -m bench compare``
- ``servers NAME``: the last run in ``results/serving/NAME.jsonl``
- ``baselines readme``: the rows in `CPU_RESULTS` and `SERVED_RUNS`
- ``ranks NAME``: the rows of ``results/parallel/NAME.jsonl``

Measures nothing.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import (
    cell_text,
    decimal,
    megabytes,
    short_commit,
    span,
    with_spread,
)
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import stats
from tilewright.options.engine_config import current_flags
from tilewright.utils.files import write_file
from tilewright.utils.json_lines import read_records

SCHEMA = 2
"""Version of a file of ``python -m bench compare``."""

Record = dict[str, Any]
Render = Callable[..., str]


def read_parts(path: Path) -> dict[str, Record]:
    """Return all parts by name. A missing or empty file has none.

    Raises:
        ConfigError: for another kind of file.
    """
    try:
        content = path.read_bytes() if path.is_file() else b""
        found: Any = json.loads(content) if content.strip() else {"schema": SCHEMA, "parts": {}}
        if found["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema {found['schema']}; allowed: {SCHEMA}")
        parts: dict[str, Record] = found["parts"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{path}: no record; allowed: one of python -m bench compare --json"
        ) from None
    return parts


def write_part(path: Path, name: str, record: Record) -> None:
    """Write a part into a file and keep the other parts.

    Raises:
        ConfigError: for another kind of file, or a write error.
    """
    parts = read_parts(path) | {name: record}
    text = json.dumps({"schema": SCHEMA, "parts": parts}, indent=1) + "\n"
    write_file(path, text.encode())


def read_rows(path: Path, command: str) -> list[Record]:
    """Return the rows in a file with JSON lines.

    Raises:
        ConfigError: if there are none, or for a malformed line.
    """
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    found = read_records(path, decode, expected="not a row") if path.exists() else []
    if not found:
        raise ConfigError(
            f"{path} is missing; allowed: rows of python -m bench {command} --results"
        )
    return [each.record for each in found]


def median_and_range(values: Sequence[float]) -> str:
    """Return the median with lowest and highest value, as ``5.0 (3.0 to 6.0)``."""
    if not values:
        return ""
    low, middle, high = (
        decimal(value, grouped=True)
        for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} to {high})"


def _rate(value: float) -> str:
    return decimal(value, 0 if value >= 100 else 1, grouped=True)


def _spread(text: str, repeats: Sequence[float], *, is_full: bool) -> str:
    has_spread = is_full and len(repeats) > 1
    return with_spread(text, stats.spread(repeats) if has_spread else None, 0)


def rates_table(record: Record, *, is_full: bool = False) -> Table:
    """Return rates, and ratios to each baseline.

    ``is_full``: with the weight bytes and all spreads.
    """
    measures = [each["name"] for each in record["measures"]]
    peers = list(dict.fromkeys(each["peer"].split()[0] for each in record["ratios"]))
    busy = [name for name in measures if "-busy" in name]
    columns = ("engine", "weights", *("MB",) * is_full, *map(_title, measures), "of read rate")
    columns += ("kept beside them",) * bool(busy)
    columns += tuple(f"of {name}'s, in this order" for name in peers)
    rows = []
    for each in record["contestants"]:
        if not (rates := each["rates"]):
            continue
        size = (megabytes(each["weight_bytes"], grouped=True),) if is_full else ()
        share = each["bandwidth_share"]
        cells = (
            _spread(_rate(rates[name]["median"]), rates[name]["repeats"], is_full=is_full)
            if name in rates
            else ""
            for name in measures
        )
        read = "" if share is None else f"{100 * share:.0f} %"
        kept = (_kept(rates, busy),) * bool(busy)
        found = _ratios(record, f"{each['engine']} {each['weights']}", is_full=is_full)
        ratios = (
            ", ".join(found[peer, name] for name in measures if (peer, name) in found)
            for peer in peers
        )
        rows.append((each["engine"], each["weights"], *size, *cells, read, *kept, *ratios))
    return Table.of(columns, rows)


def source_of(record: Record) -> str:
    """Return a caption with model, machine, date, commit and spread."""
    readings = [each / 1e9 for each in record["bandwidth"]["readings"]]
    spreads = [
        stats.spread(each["repeats"]) for each in record["ratios"] if len(each["repeats"]) > 1
    ]
    spread = ""
    if spreads:
        ends = span(100 * min(spreads), 100 * max(spreads), 0, joint=" to ")
        spread = f" Ratios are per round, with spreads from `{ends} %`."
    rounds = "1 round" if record["num_rounds"] == 1 else f"{record['num_rounds']} rounds in turn"
    return (
        f"{record['model']}, {record['num_threads']} threads of {_cpu_name(record)} "
        f"({record['timestamp'][:10]}, commit {short_commit(record['commit'])}). "
        f"Medians over {rounds}, in tokens/s for all users together.{spread} "
        f"Memory read rates are `{min(readings):.1f} to {max(readings):.1f} GB/s`, "
        "with a stream per thread."
    )


def _title(measure: str) -> str:
    """Return ``prefill 512``, ``decode, 8 users`` or ``decode beside 1 process``."""
    kind, length, *rest = measure.split("-")
    title = f"prefill {length}" if kind == "prefill" else kind
    if rest and rest[0].startswith("busy"):
        number = rest[0].removeprefix("busy")
        return f"{title} beside {number} process{'' if number == '1' else 'es'}"
    return f"{title}, {rest[0].removeprefix('x')} users" if rest else title


def _kept(rates: Mapping[str, Record], busy: Sequence[str]) -> str:
    """Return rates with busy processes, relative to the idle machine."""
    shares = []
    for name in busy:
        alone = rates[name.rpartition("-")[0]]["repeats"]
        beside = rates[name]["repeats"] if name in rates else []
        each = [mine / own for mine, own in zip(beside, alone, strict=False)]
        shares.append(f"{100 * statistics.median(each):.0f} %" if each else "")
    return ", ".join(shares)


def _ratios(record: Record, name: str, *, is_full: bool) -> dict[tuple[str, str], str]:
    """Return median ratios by baseline and measure."""
    return {
        (each["peer"].split()[0], each["measure"]): _spread(
            f"{statistics.median(each['repeats']):.2f}", each["repeats"], is_full=is_full
        )
        for each in record["ratios"]
        if each["ours"] == name
    }


def _peers(results: Path, name: str, part: str = "") -> str:
    path = results / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; allowed: a record of python -m bench compare --json")
    parts = read_parts(path)
    if part not in parts:
        raise ConfigError(f"{path}: no part {part!r}; {allowed(parts, part)}")
    return f"{rates_table(parts[part]).markdown()}\n{source_of(parts[part])}"


_SERVED = {
    "output_tokens_per_second": "output t/s",
    "ttft_ms_p50": "TTFT p50 (ms)",
    "tpot_ms_p50": "TPOT p50 (ms)",
    "later_ttft_ms_p50": "later turns' TTFT p50 (ms)",
    "cached_percent_of_shareable": "cached of shareable (%)",
    "cached_percent_of_prompts": "cached of all prompts (%)",
    "start_s": "start (s)",
    "num_pages": "KV pages",
}
_OWN, _OFFLINE = "tilewright", "tilewright run"


def servers_table(rows: Sequence[Record]) -> Table:
    """Return medians over passes with their range, and the ratio to the first baseline.

    The column A/A has the largest quotient of two passes of the same server, ours and theirs.
    """
    others = dict.fromkeys(row["server"] for row in rows if row["server"] not in (_OWN, _OFFLINE))
    names = (_OWN, *others, _OFFLINE)
    lines = []
    for pair, users in dict.fromkeys((row["pair"], row["users"]) for row in rows):
        own = [row for row in rows if (row["pair"], row["users"]) == (pair, users)]
        for figure, title in _SERVED.items():
            found = {
                name: [row[figure] for row in own if row["server"] == name and figure in row]
                for name in names
            }
            if not all(found[name] for name in names[:2]):
                continue
            sides = [*found.values()][:2]
            ours, theirs = map(statistics.median, sides)
            cells = map(median_and_range, found.values())
            ratio = f"{ours / theirs:.2f} x" if theirs else ""
            noise = ", ".join(map(_noise, sides))
            lines.append([cell_text(pair), str(users), title, *cells, ratio, noise])
    columns = ("ours / theirs", "users", "figure", _OWN, *others, "run", "ratio", "A/A")
    return Table.of(columns, lines)


def _noise(passes: Sequence[float]) -> str:
    low, high = min(passes), max(passes)
    return f"{high / low:.2f}" if 0 < low < high else "-"  # equal: one measurement


def _servers(results: Path, name: str) -> str:
    rows = read_rows(results / "serving" / f"{name}.jsonl", "compare-serve")
    last = rows[-1]
    run = [row for row in rows if row["date"] == last["date"]]
    rounds = 1 + max(row["round"] for row in run)
    source = (
        f"{rounds} round{'s' * (rounds > 1)} in turn, medians (lowest to highest); {last['host']} "
        f"({last['date'][:10]}, commit {short_commit(last['commit'])})."
    )
    return f"{servers_table(run).markdown()}\n{source}"


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run with two servers after each other, in ``serving/h200.jsonl``."""

    model: str
    name: str
    commit: str
    users: tuple[int, ...]


CPU_RESULTS = (("q40", 1), ("q40", 8), ("q80", 1), ("bf16", 1), ("bf16", 8))
"""Last part of a precision's name, and users, for results in ``compare.json``."""

CPU_RECORDS = ("avx512", "zen3")

SERVED_RUNS = (
    ServedRun("shape:llama-3.1-8b", "Llama-3.1-8B (random weights)", "a946ec73", (8, 32, 64, 256)),
    ServedRun("shape:llama-3.1-8b", "Llama-3.1-8B (random weights)", "3d465be", (1,)),
    ServedRun("shape:qwen3.5-35b-a3b", "Qwen3.5-35B-A3B (random weights)", "a946ec73", (64,)),
)
_README = (
    *("device", "model", "precision", "users", "Tilewright (tokens/s)"),
    *("baseline", "baseline (tokens/s)", "ratio"),
)
_CPU_BASELINE, _GPU_BASELINE = "llama.cpp", "vLLM"


def _baselines(results: Path, name: str) -> str:
    del name  # One table exists.
    path = results / "compare.json"
    parts = read_parts(path)
    if missing := [each for each in CPU_RECORDS if each not in parts]:
        raise ConfigError(
            f"{path}: no part {missing[0]!r}; allowed: a run of python -m bench compare --part"
        )
    records = [parts[each] for each in CPU_RECORDS]
    served = results / "serving" / "h200.jsonl"
    rows = [row for row in read_rows(served, "bench --url") if row.get("plan") == "streams"]
    lines = [
        _cpu_line(path, record, format_name, users)
        for record in records
        for format_name, users in CPU_RESULTS
    ]
    captions = [
        f"{_cpu_name(record)}: `make compare`, decode after 128 tokens, {record['num_threads']} "
        f"threads, medians of {record['num_rounds']} alternating rounds, Tilewright "
        f"{record['versions']['tilewright']} ({record['timestamp'][:10]}, commit "
        f"`{short_commit(record['commit'])}`)."
        for record in records
    ]
    for run in SERVED_RUNS:
        pairs = [_served_pair(served, rows, run, users) for users in run.users]
        for own, other in pairs:
            rate, theirs = (row["output_tokens_per_second"] for row in (own, other))
            cells = own["device"], run.name, own["precision"], str(own["concurrency"])
            baseline = other["server"].partition(",")[0]
            lines.append((*cells, _rate(rate), baseline, _rate(theirs), f"{rate / theirs:.2f}"))
        captions.append(_served_caption(run, *pairs[0]))
    return f"{Table.of(_README, lines).markdown()}\n" + "  \n".join(captions)


def _cpu_name(record: Record) -> str:
    return ", ".join(filter(None, (record["device"], record.get("instruction_set"))))


def _cpu_line(path: Path, record: Record, format_name: str, users: int) -> tuple[str, ...]:
    measure = "decode-128" + (f"-x{users}" if users > 1 else "")
    ratio = _only(
        f"{path}: {{}} rows for the ratio of {format_name} to {_CPU_BASELINE} at {measure}",
        record["ratios"],
        lambda item: (
            item["measure"] == measure
            and item["ours"].endswith((f" {format_name}", f"-{format_name}"))
            and item["peer"].startswith(_CPU_BASELINE)
        ),
    )
    rates = {
        f"{item['engine']} {item['weights']}": item["rates"][measure]["median"]
        for item in record["contestants"]
        if measure in item["rates"]
    }
    precision, own_rate = ratio["ours"].rpartition(" ")[2], _rate(rates[ratio["ours"]])
    cells = _cpu_name(record), record["model"], precision, str(users), own_rate
    peer = ratio["peer"]
    return (*cells, peer, _rate(rates[peer]), f"{statistics.median(ratio['repeats']):.2f}")


def _served_pair(
    path: Path, rows: Sequence[Record], run: ServedRun, users: int
) -> tuple[Record, Record]:
    wanted = run.model, run.commit, users, 0.0

    def row_of(server: str) -> Record:
        return _only(
            f"{path}: {{}} rows for {server} with {users} users at commit {run.commit}",
            rows,
            lambda row: (
                (row["model"], row["commit"], row["concurrency"], row["rate"]) == wanted
                and row["server"].startswith(server)
            ),
        )

    return row_of("tilewright serve"), row_of(_GPU_BASELINE)


def _only(error: str, items: Sequence[Record], is_selected: Callable[[Record], bool]) -> Record:
    selected = [item for item in items if is_selected(item)]
    if len(selected) != 1:
        raise ConfigError(f"{error.format(len(selected))}; allowed: exactly 1")
    return selected[0]


def _served_caption(run: ServedRun, own: Record, baseline: Record) -> str:
    length = own["output_tokens"] // own["requests"]
    command = current_flags(own["server"].removeprefix("tilewright "))
    return (
        f"{run.name.partition(' ')[0]}: `{command}`, {baseline['server'].partition(',')[0]} "
        f"after it on the same GPU, no prefix cache, prompts of {own['input_tokens']:,} tokens, "
        f"outputs of {length} tokens, one round of `bench/cuda/round.sh OUT streams` "
        f"({own['date']}, commit `{run.commit}`)."
    )


_RANKS = (
    *("model", "precision", "GPUs", "users", "decode (tokens/s)"),
    *("read rate of a GPU (TB/s)", "first token (ms)"),
)


def _ranks(results: Path, name: str) -> str:
    records = read_rows(results / "parallel" / f"{name}.jsonl", "bench-cuda")
    rows = [
        (
            record["model"] + (" (random weights)" if record["weights"] == "random" else ""),
            record["precision_name"],
            record["mesh"].rpartition("x")[2],
            str(record["batch"]),
            decimal(record["tps"], 1 if record["tps"] < 100 else 0),
            decimal(statistics.median(record["ceilings"]["reads"]) / 1e12, 2),
            decimal(record["ttft_ms"], 1) if record["batch"] == 1 else "",
        )
        for record in records
    ]
    first = records[0]
    where = f"{first['timestamp'][:10]}, commit `{short_commit(first['commit'])}`"
    command = first["command"].replace("tilewright bench-cuda", "python -m bench bench-cuda")
    text = Table.of(_RANKS, rows).markdown()
    return f"{text}\n\n{first['device']} ({where}), `{command}` and further rows.\n"


BLOCKS: Mapping[str, Render] = {
    "peers": _peers,
    "servers": _servers,
    "baselines": _baselines,
    "ranks": _ranks,
}


def render_blocks(text: str, results: Path, **more: Render) -> str:
    """Return a document with new blocks. ``more`` adds kinds to `BLOCKS`.

    Raises:
        ConfigError: if records are missing, or without a block.
    """
    kinds = {**BLOCKS, **more}
    pattern = rf"(<!-- ({'|'.join(kinds)}):begin ([\w-]+(?: [\w-]+)?) -->\n).*?(<!-- \2:end \3 -->)"

    def block(found: re.Match[str]) -> str:
        made = kinds[found[2]](results, *found[3].split())
        return f"{found[1]}\n{made.rstrip()}\n\n{found[4]}"

    rendered, count = re.subn(pattern, block, text, flags=re.DOTALL | re.ASCII)
    if not count:
        raise ConfigError(f"no block to render; {allowed(kinds)}")
    return rendered
