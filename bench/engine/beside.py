"""An engine's file beside the CUDA target: decoded tokens a second, with the same random weights.

Either is made and timed in a process of its own, in turn, for a GPU need not hold both. ``python -m
bench.engine.beside '{...}'`` is such a process, see `Side`; it writes a line of JSON when it is
ready and one for each number of users.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.cuda.measure import Bench, run_options
from bench.cuda.rows import DECODE, BenchRow
from bench.engine.measure import waits
from bench.in_turn import median_and_range, with_checkout
from tilewright.cli.measure import measure
from tilewright.cli.terminal.console import compile_progress, err, out, print_table
from tilewright.compiler.driver import lower_model, resolve_precision, silent
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda.engine_generator.emit import engine_source
from tilewright.compiler.targets.cuda.engine_generator.parts.weights import plain_name
from tilewright.compiler.targets.cuda.engine_generator.trial import load_engine
from tilewright.compiler.targets.cuda.plan import make_plan
from tilewright.compiler.targets.table import get_target
from tilewright.errors import TilewrightError, one_line
from tilewright.evaluate.report.display import percent
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.loading.engine_config import engine_config
from tilewright.loading.source import Source, open_source
from tilewright.models import LoadedModel, load_model
from tilewright.models.checkpoints.base import Checkpoint
from tilewright.models.shapes import ShapeName
from tilewright.utils.child_process import PYTHON, Child

TARGET, FILE = "target", "file"
FEWEST_TOKENS = 3
"""The first comes with the prompt and the second is not timed."""

_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What one process measures: of a shape the file ``engine``, or the target itself where that is
    None. ``tokens``: what each of the ``users`` is answered, behind a prompt of ``prompt_length``.
    """

    engine: str | None
    shape: str
    device: str
    users: tuple[int, ...]
    prompt_length: int
    tokens: int
    repeats: int

    def rows(self) -> list[BenchRow]:
        """The rows that ``bench-cuda`` would measure."""
        return [
            BenchRow(
                _users(count),
                self.shape,
                "bf16",
                DECODE,
                batch=count,
                prompt_length=self.prompt_length,
                num_generated=self.tokens,
            )
            for count in self.users
        ]

    def prompts(self, source: Source, row: BenchRow) -> list[Tensor]:
        """A row's prompts, as both sides have them."""
        options = run_options(row, target=self.device, repeats=self.repeats)
        jobs = measure.plan_jobs(source, options).jobs
        return [torch.tensor(job.prompt) for job in jobs]


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens a second of all users in every repeat, and each user's first token."""

    users: int
    rates: list[float]
    firsts: list[int]


def compare(
    sides: Mapping[str, Side], *, rounds: int, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure `TARGET` and `FILE` in turn, and print every round and a table of all.

    ``keep`` is handed what was measured so far after each process.

    Raises:
        TilewrightError: for a side that fails.
    """
    screen, found = out(), {name: list[Rates]() for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            made_s, measured = _in_child(name, side)
            found[name] += measured
            said = "; ".join(
                f"{_users(each.users)} {median_and_range(each.rates)} t/s" for each in measured
            )
            line = f"round {number + 1}, {name}: {said}; made in {made_s:.1f} s"
            screen.print(line, soft_wrap=True)
            keep({each: [asdict(rate) for rate in rates] for each, rates in found.items()})
    side = next(iter(sides.values()))
    rows = [_Pair.of(count, found) for count in dict.fromkeys(side.users)]
    title = f"shape:{side.shape} {RANDOM_WEIGHTS}, the same in both; {side.device}"
    print_table(screen, title, Table.by(COLUMNS, rows, *_notes(side, rounds)), numbers=True)


@dataclass(frozen=True, slots=True)
class _Pair:
    """Both sides at a number of users, all rounds together."""

    users: int
    target: list[float]
    file: list[float]
    num_equal: int

    @classmethod
    def of(cls, users: int, found: Mapping[str, Sequence[Rates]]) -> _Pair:
        target, file = ([each for each in found[n] if each.users == users] for n in (TARGET, FILE))
        equal = sum(a == b for a, b in zip(target[0].firsts, file[0].firsts, strict=True))
        return cls(users, _rates_of(target), _rates_of(file), equal)

    @property
    def share(self) -> float:
        """What the file reaches of the target."""
        return statistics.median(self.file) / statistics.median(self.target)


def _rates_of(measured: Sequence[Rates]) -> list[float]:
    return [rate for each in measured for rate in each.rates]


COLUMNS: Columns[_Pair] = {
    "users": lambda found: str(found.users),
    "target, t/s": lambda found: median_and_range(found.target),
    "file, t/s": lambda found: median_and_range(found.file),
    "file of target": lambda found: f"{percent(found.share)} %",
    "equal first tokens": lambda found: f"{found.num_equal} of {found.users}",
}


def _notes(side: Side, rounds: int) -> tuple[str, ...]:
    return (
        f"medians (and ranges) of {side.repeats} repeats in each of {rounds} rounds in turn: "
        f"decoded tokens of all users, {side.tokens} each behind prompts of "
        f"{side.prompt_length:,}, the first step left out",
        "both choose the likeliest token; the target is measured as by bench-cuda, in bf16; "
        "97 % are asked of a file on a GPU",
    )


def _users(count: int) -> str:
    return "1 user" if count == 1 else f"{count} users"


def write_engine(shape: str, folder: Path) -> Path:
    """Write the ``engine.py`` that ``--emit engine`` makes of a shape, without weights.

    Raises:
        CompileError: for a model that generated engines cannot run.
    """
    model = load_model(ShapeName(shape))
    resolved = resolve_precision(model, load_precision("reference"))
    graph, _ = lower_model(model, resolved, get_target("cuda").stages(), silent)
    text = engine_source(make_plan(graph), _config_of(model), title=model.name)
    path = folder / "engine.py"
    path.write_text(text, "utf-8")
    return path


def _config_of(model: LoadedModel) -> dict[str, Any]:
    return {**engine_config(model.config), "torch_dtype": "bfloat16"}


def measure_side(side: Side) -> Iterator[float | Rates]:
    """The seconds until a side is ready, then what it makes of each number of users.

    Raises:
        TilewrightError: where it cannot be made, or prompts and answers do not fit it.
    """
    yield from _measure_target(side) if side.engine is None else _measure_file(side)


def _measure_target(side: Side) -> Iterator[float | Rates]:
    rows = side.rows()
    with compile_progress(err()) as progress:
        made = Bench(rows, target=side.device, repeats=side.repeats, progress=progress)
    yield made.seconds_to_compile
    for row in rows:
        runs = made.runs(row)
        rates = [row.batch * run.repeat.decode_tsu for run in runs if run.repeat.decode_tsu]
        yield Rates(row.batch, rates, [each[0] for each in runs[0].outputs])
    made.close()


def _measure_file(side: Side) -> Iterator[float | Rates]:
    assert side.engine is not None
    begun, device = time.perf_counter(), torch.device(side.device)
    source = open_source(ShapeName(side.shape))
    engine = made_engine(load_engine(side.engine), source.checkpoint_model(), device)
    yield time.perf_counter() - begun
    for row in side.rows():
        answer = partial(_answer, engine, side.prompts(source, row), wait=waits(device))
        answer(_WARM_UP_TOKENS)
        answers = [answer(side.tokens) for _ in range(side.repeats)]
        yield Rates(row.batch, [rate for rate, _ in answers], answers[0][1])


def _answer(
    engine: Any, prompts: Sequence[Tensor], tokens: int, *, wait: Callable[[], object]
) -> tuple[float, list[int]]:
    """Tokens a second of all users as `timing.figures` counts them, and their first tokens."""
    ids = list(range(len(prompts)))
    firsts = engine.prefill(ids, prompts).argmax(-1)
    chosen = engine.decode(ids, firsts).argmax(-1)
    wait()
    begun = time.perf_counter()
    for _ in range(tokens - 2):
        chosen = engine.decode(ids, chosen).argmax(-1)
    wait()
    seconds = time.perf_counter() - begun
    engine.remove(ids)
    return len(ids) * (tokens - 2) / seconds, firsts.tolist()


def made_engine(module: Any, model: LoadedModel, device: torch.device) -> Any:
    """The engine of a generated file with a shape's random weights, which no file has.

    It does what the file's ``create_engine`` does, but that weights are drawn on the device: those
    of experts, nearly all of a mixture's, one after another as the engine takes them.
    """
    family = module.FAMILY
    settings = family.read_settings(_config_of(model), device)
    tensors = settings.prepared(_drawn(model.checkpoint, settings.shapes(), device))
    executor = family.on_gpu if device.type == "cuda" else family.on_cpu
    return module.Engine(executor(tensors, settings, device), settings)


def _drawn(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], device: torch.device
) -> dict[str, Any]:
    """The tensors of an engine by the names that it has for them."""
    names = {plain_name(name): name for name in checkpoint.names}
    names.setdefault("lm_head.weight", names["embed_tokens.weight"])
    made: dict[str, Any] = {}  # by the checkpoint's names: a tied table is one tensor
    for name in shapes:
        late = _Late(checkpoint, names[name])
        if names[name] not in made:
            made[names[name]] = late if ".experts." in name else late.to(device)
    return {name: made[names[name]] for name in shapes}


@dataclass(frozen=True, slots=True)
class _Late:
    """Stands for a tensor that is drawn when it is moved to a device."""

    checkpoint: Checkpoint
    name: str

    def to(self, device: torch.device, dtype: torch.dtype | None = None, **_: bool) -> Tensor:
        with torch.device(device):
            return self.checkpoint.get(self.name).to(dtype=dtype or torch.bfloat16)


def _in_child(name: str, side: Side) -> tuple[float, list[Rates]]:
    """What another process measures of a side: its seconds until it was ready, and its rates."""
    command = [*PYTHON, "-m", "bench.engine.beside", json.dumps(asdict(side))]
    with Child(command, environment=with_checkout(), what=f"the {name}") as child:
        ended = child.wait()
        assert ended is not None
        if ended.code:
            raise TilewrightError(f"the {name}: {ended.how}: {ended.last}")
        made_s, *found = map(json.loads, child.output().splitlines())
    return made_s, [Rates(**each) for each in found]


def main(argv: Sequence[str]) -> int:
    """Measure the side that ``argv`` describes; a line of JSON for each of its figures."""
    given = json.loads(argv[0])
    try:
        for found in measure_side(Side(**{**given, "users": tuple(given["users"])})):
            print(json.dumps(found if isinstance(found, float) else asdict(found)), flush=True)
    except TilewrightError as error:
        print(one_line(error, 400), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
