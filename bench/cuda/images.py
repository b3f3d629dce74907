"""``python -m bench images``: speed with images, for shapes with random weights.

Measures the tower, the first token of a prompt with an image, and decoding with an image per
request. Rows with text use the same program.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import keeper
from bench.cuda.rows import DECODE, BenchRow
from tilewright.cli.terminal.console import compile_progress, err, note, out
from tilewright.compiler.devices import check_gpu
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.image_tables import render_measurements
from tilewright.evaluate.results.result_file import append
from tilewright.images.noise import noise_picture
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.json_lines import check_writable

if TYPE_CHECKING:
    from bench.cuda.measure import Bench
    from tilewright.images.prompt import PromptImage
    from tilewright.runtime.scheduling.request_state import RequestState

    Chat = tuple[tuple[int, ...], tuple[PromptImage, ...]]

Keep = Callable[[Mapping[str, Any]], None]

PROGRAMS: Mapping[str, tuple[str, str]] = {
    "11b-performance": ("llama-3.2-11b-vision", "performance"),
    "11b-accuracy": ("llama-3.2-11b-vision", "accuracy"),
    "11b-bf16": ("llama-3.2-11b-vision", "bf16"),
    "90b-performance": ("llama-3.2-90b-vision", "performance"),
    "35b-a3b-bf16": ("qwen3.5-35b-a3b-vision", "bf16"),
    "27b-bf16": ("qwen3.8-27b-vision", "bf16"),
    "tiny": ("tiny-vision", "performance"),
    "tiny-hybrid": ("tiny-hybrid-vision", "bf16"),
}
"""Shape and precision by name."""

SIDES, USERS, REPEATS = (560, 1120), (1, 32), 3
_DEFAULT = ("11b-performance", "90b-performance")
_TEXT, _GENERATED = 127, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    rows: tuple[str, ...] = option(
        f"programs (default: {' '.join(_DEFAULT)})", default=_DEFAULT, metavar="NAME"
    )
    target: str = option("target", default="cuda")
    sides: tuple[int, ...] = option(
        "image sides in pixels", default=SIDES, nargs="+", type=integer(1, 4096)
    )
    users: tuple[int, ...] = option(
        "users; several have images with the smallest side",
        default=USERS,
        nargs="+",
        type=integer(1, 256),
    )
    repeats: int = option(f"repeats ({REPEATS})", default=REPEATS, type=integer(1, 1000))
    tower: bool = option("measure only the tower", default=False)
    results: Path | None = option("append image rows, as JSON lines", metavar="FILE", type=Path)
    records: Path | None = option("append records of text rows", metavar="FILE", type=Path)


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench images``. Return 0.

    Raises:
        TilewrightError: for bad arguments, or without a GPU.
    """
    words = "Measure towers, first tokens and decoding with images and random weights."
    options = parse(_Options, argv, prog="python -m bench images", description=words)
    for name in options.rows:
        if name not in PROGRAMS:
            raise ConfigError(f"--rows {name!r}; {allowed(PROGRAMS, name)}")
    if options.records is not None:
        check_writable(options.records)
    keep = keeper(options.results)
    if options.target == "cuda":
        check_gpu()
    screen = out()
    for name in options.rows:
        with _Session(name, options) as session:
            note(screen, session.made.text())
            results = session.measure()
        for values in results:
            keep(values)
        screen.print(render_measurements(results), markup=False, soft_wrap=True)
    return 0


class _Session:
    """A compiled program with its measurements."""

    def __init__(self, name: str, options: _Options) -> None:
        from bench.cuda.measure import Bench

        self._command, self._options = f"python -m bench images --rows {name}", options
        shape, precision = PROGRAMS[name]
        self._processor = _processor(shape)
        longest = max(self._prepared(side, 0).num_tokens for side in options.sides)
        context = _TEXT + longest + 200
        users = (1,) if options.tower else options.users
        self._text_rows = tuple(
            BenchRow(f"{name}-b{count}", shape, precision, DECODE, batch=count, context=context)
            for count in users
        )
        with compile_progress(err()) as progress:
            self.made: Bench = Bench(
                self._text_rows, target=options.target, repeats=options.repeats, progress=progress
            )

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.made.compiled.executable.encoder = None  # its tower has memory of the device
        self.made.close()

    def measure(self) -> list[dict[str, Any]]:
        """Return the image rows. Text rows are recorded."""
        options = self._options
        towers = {side: self._tower(side) for side in options.sides}
        if options.tower:
            return [{**towers[side], "users": 1} for side in options.sides]
        self._record_text()
        rows = []
        for count in options.users:
            for side in options.sides if count == 1 else (min(options.sides),):
                rows.append({**towers[side], **self._generate(side, count)})
        return rows

    def _facts(self, side: int) -> dict[str, Any]:
        compiled = self.made.compiled
        return {
            "engine": "tilewright",
            "model": self.made.source.name,
            "weights": "random",
            "precision": compiled.precision.name,
            "device": compiled.executable.device_name,
            "target": compiled.target,
            "side": side,
            "command": f"{self._command} --tower" if self._options.tower else self._command,
        }

    def _prepared(self, side: int, seed: int) -> Any:
        """Return a resized image of noise."""
        return self._processor.prepare(noise_picture(side, seed))

    def _tower(self, side: int) -> dict[str, Any]:
        """Return the times of the image processor and the tower in milliseconds."""
        encoder = self.made.compiled.executable.encoder
        assert encoder is not None, "the target takes no images"
        image, prepare, tower = self._prepared(side, 0), list[float](), list[float]()
        for repeat in range(-1, self._options.repeats):  # the first run loads the tower
            picture, started = noise_picture(side, repeat + 1), time.perf_counter()
            image, middle = self._processor.prepare(picture), time.perf_counter()
            encoder.encode_tensor(image.height, image.width, image.pixels)[-1].sum().item()
            if repeat >= 0:
                prepare.append(1e3 * (middle - started))
                tower.append(1e3 * (time.perf_counter() - middle))
        sizes = {"image_tokens": image.num_tokens, "image_rows": image.num_rows}
        return {**self._facts(side), **sizes, "prepare_ms": prepare, "tower_ms": tower}

    def _record_text(self) -> None:
        """Measure the rows with text."""
        from tilewright.evaluate.measure.ceilings import measure_ceilings

        ceilings = measure_ceilings(self._options.target)
        for workload in self._text_rows:
            result = self.made.measure(workload, ceilings).result
            if result is not None and self._options.records is not None:
                append(self._options.records, replace(result, command=self._command))

    def _generate(self, side: int, users: int) -> dict[str, Any]:
        """Return times for the first token and decode rates, with an image per user."""
        from tilewright.evaluate.measure.timing import figures

        chats = [self._chat(side, user) for user in range(users)]
        runs = []
        for repeat in range(-1, self._options.repeats):
            requests, started = self._run(chats)
            if repeat >= 0:
                runs.append(figures(requests, started))
        gc.collect()
        return {
            "users": users,
            "prompt": len(chats[0][0]),
            "generated": _GENERATED,
            "ttft_ms": [run.ttft_ms for run in runs],
            "decode_tsu": [run.decode_tsu for run in runs],
        }

    def _chat(self, side: int, seed: int) -> Chat:
        """Return a prompt of random text with an image as the second token."""
        import random

        from tilewright.images.prompt import insert_images

        draw = random.Random(seed)
        text = [draw.randrange(256) for _ in range(_TEXT)]
        tokens = [text[0], self._processor.image_token, *text[1:]]
        return insert_images(tokens, [self._prepared(side, seed)], self._processor.image_token)

    def _run(self, chats: Sequence[Chat]) -> tuple[list[RequestState], float]:
        """Run requests. The loop encodes every image again."""
        from tilewright.compiler.sampling.params import SamplingParams
        from tilewright.evaluate.measure.timing import OFFLINE
        from tilewright.runtime.loop import EngineLoop
        from tilewright.runtime.scheduling.request_state import RequestState

        sampling = SamplingParams(max_tokens=_GENERATED)
        requests = [
            RequestState(user, prompt, sampling, images=images)
            for user, (prompt, images) in enumerate(chats)
        ]
        loop = EngineLoop(self.made.compiled.executable, policy=OFFLINE)
        started = time.perf_counter()
        loop.generate(requests)
        return requests, started


def _processor(shape: str) -> Any:
    from tilewright.models import load_model

    vision = load_model(f"shape:{shape}").vision
    assert vision is not None, "a shape without a tower"
    return vision.processor
