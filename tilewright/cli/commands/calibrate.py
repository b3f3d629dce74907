"""``tilewright calibrate``: choose weight codes on a text, and write a folder to run."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.compiler.precision import AUTO, load_precision
from tilewright.errors import ConfigError
from tilewright.models import FoundModel, calibrated_precision, check_header, find_model_or_shape
from tilewright.options.arguments import integer, option, output_folder, parse
from tilewright.utils.files import read_regular, read_text

if TYPE_CHECKING:
    import torch

    from tilewright.compiler.calibration.calibrate import Method, Prepared
    from tilewright.compiler.precision import PrecisionConfig, ResolvedPrecision
    from tilewright.compiler.targets.interface.base import Progress
    from tilewright.models import LoadedModel
    from tilewright.models.checkpoints.calibrated.manifest import CalibrationFacts

_TEXT = Path(__file__).parents[2] / "evaluate" / "cases" / "calibration.txt"
_DEFAULT_TEXT = "the package's text"
_MIN_SEQUENCES = 4
_CPU, _CUDA = "cpu", "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class _CalibrateArgs:
    model: str | None = option(
        "checkpoint to calibrate, as for tilewright run (default: smollm2)", "model", nargs="?"
    )
    precision: str = option(
        "configuration of the weights: a name in precision_cfgs/, a file or a heading",
        default="performance",
        metavar="NAME",
    )
    output: str | None = option(
        "a new or empty folder, or an interrupted calibration's",
        "-o",
        "--output",
        metavar="DIR",
    )
    text: str | None = option(
        f"UTF-8 text file to calibrate on (default: {_DEFAULT_TEXT} of several domains)",
        metavar="FILE",
    )
    imatrix: str | None = option("llama.cpp importance matrix, instead of a text", metavar="FILE")
    fast: bool = option("use the method imatrix: a forward, no factorization", default=False)
    method: str | None = option(
        "gptq, imatrix or rtn (round to nearest) (default: gptq)",
        choices=("gptq", "imatrix", "rtn"),
    )
    tune_norms: bool = option(
        "then rescale the norm weights on the text, by gradients: smaller loss, more time",
        default=False,
    )
    block_axis: str | None = option(
        "block axis: in, or out for Tenstorrent boards (default: the configuration's)",
        choices=("in", "out"),
    )
    tokens: int = option(
        "maximum number of tokens", default=32768, type=integer(256, 1 << 24), metavar="N"
    )
    length: int = option(
        "tokens in a sequence", default=256, type=integer(16, 1 << 16), metavar="N"
    )
    reuse: tuple[str, ...] = option(
        "calibrated folders with the same text and method: copy their codes in equal formats",
        default=(),
        nargs="+",
        metavar="DIR",
    )
    device: str | None = option(
        "cpu or cuda (default: cuda if there is a GPU)", choices=(_CPU, _CUDA)
    )


def main(argv: list[str]) -> int:
    """Run ``tilewright calibrate`` with its arguments. Return the exit code."""
    options = parse(
        _CalibrateArgs,
        argv,
        prog="tilewright calibrate",
        description="Choose the codes of block formats on a text, and write a folder to run.",
    )
    name = _method_name(options)
    found = find_model_or_shape(options.model)
    check_header(found)
    if calibrated_precision(found) is not None:
        raise ConfigError(f"{found}: is calibrated already; allowed: the original checkpoint")
    if options.precision == AUTO:
        raise ConfigError(f"--precision {AUTO}; allowed: a configuration with formats")
    precision = load_precision(options.precision)
    output = _output(options.output)
    text = _read_text(options) if name != "rtn" and options.imatrix is None else ""
    return _run(options, name, found, precision, output, text)


def _method_name(options: _CalibrateArgs) -> str:
    """Return the chosen method.

    Raises:
        ConfigError: for conflicting options.
    """
    if options.fast and options.method not in (None, "imatrix"):
        raise ConfigError(f"--fast and --method {options.method}; allowed: one of them")
    if options.imatrix is not None and options.text is not None:
        raise ConfigError("--imatrix and --text; allowed: one of them")
    if options.imatrix is not None and options.method not in (None, "imatrix"):
        raise ConfigError(f"--imatrix with --method {options.method}; allowed: --method imatrix")
    if options.method == "rtn" and options.text is not None:
        raise ConfigError("--text with --method rtn; allowed: --method gptq or imatrix")
    if options.tune_norms and (options.imatrix is not None or options.method == "rtn"):
        raise ConfigError("--tune-norms without a text; allowed: --method gptq or imatrix, --text")
    if options.fast or options.imatrix is not None:
        return "imatrix"
    return options.method or "gptq"


def _output(named: str | None) -> Path:
    from tilewright.models.checkpoints.calibrated.manifest import read_partial

    if named and read_partial(Path(named).expanduser()) is not None:
        return Path(named).expanduser()
    return output_folder(named)


def _read_text(options: _CalibrateArgs) -> str:
    """Return the calibration text.

    Raises:
        ConfigError: for a missing or empty file, or not UTF-8.
    """
    if options.text is None:
        return _TEXT.read_text(encoding="utf-8")
    path = Path(options.text).expanduser()
    text = read_text(path, f"--text {path}", hint="a UTF-8 text file")
    if not text.strip():
        raise ConfigError(f"--text {path}: is empty; allowed: a text of some thousand words")
    return text


def _run(
    options: _CalibrateArgs,
    name: str,
    found: FoundModel,
    precision: PrecisionConfig,
    output: Path,
    text: str,
) -> int:
    warnings.filterwarnings("ignore", module="torch")
    import torch

    from tilewright.cli.terminal.console import err, note
    from tilewright.compiler.calibration.calibrate import Method, calibrate, prepare
    from tilewright.compiler.driver import resolve_precision
    from tilewright.compiler.targets.interface.compiled import silent
    from tilewright.models import load_model
    from tilewright.models.checkpoints.calibrated.known import KnownFolders
    from tilewright.models.checkpoints.calibrated.manifest import TOKENIZER
    from tilewright.models.checkpoints.calibrated.writer import NORMS, CalibrationWriter

    device = _device(options.device)
    model = load_model(found)
    if options.block_axis not in (None, precision.block_axis):
        heading = resolve_precision(model, precision).heading()
        precision = _along(heading, str(options.block_axis))
    resolved = resolve_precision(model, precision)
    tokens_ST = _sequences(model, text, options) if text else torch.zeros(0, options.length)
    prepared = prepare(model, resolved, silent)
    method = Method(name, importance=_importance(options.imatrix))
    facts = _facts(options, method, model, precision, resolved, tokens_ST)
    known = KnownFolders([Path(name).expanduser() for name in options.reuse], facts)
    writer = CalibrationWriter(output, dataclasses.asdict(facts), _shapes(model))
    if writer.is_resumed:
        note(err(), f"{output}: goes on with an interrupted calibration")
    if options.text is None and text:
        note(err(), f"calibrated on {_DEFAULT_TEXT}; --text FILE of your own domain gives more")
    started = time.monotonic()
    with _progress() as report:
        how: Any = {"method": method, "device": device, "progress": report, "known": known}
        notes = tuple(dict.fromkeys(calibrate(model, prepared, tokens_ST, writer, **how)))
        if not (output / TOKENIZER).exists():
            model.tokenizer.save(output / TOKENIZER)
        if options.tune_norms and not writer.has(NORMS):
            plain = dataclasses.replace(facts, settings=facts.code_settings)
            writer.finish(plain, model.config, notes, is_last=False)
            writer.write(NORMS, [], _tuned(output, model, prepared, tokens_ST, device, report))
    writer.finish(facts, model.config, notes)
    note(err(), *notes)
    seconds = time.monotonic() - started
    _print_end(output, f"{model.name}, {precision.name}", facts, seconds, device)
    return 0


def _tuned(
    folder: Path,
    model: LoadedModel,
    prepared: Prepared,
    tokens_ST: torch.Tensor,
    device: torch.device,
    progress: Progress,
) -> dict[str, torch.Tensor]:
    """Return the norm weights for a calibrated folder, tuned on the text."""
    from tilewright.compiler.calibration.forward import LayeredForward
    from tilewright.compiler.calibration.norm_tuning import STEP_TOKENS, tune_norms
    from tilewright.compiler.driver import lower_model, resolve_precision, weight_source
    from tilewright.compiler.ir.recipe import load_values
    from tilewright.compiler.targets.interface.compiled import silent
    from tilewright.compiler.targets.pipeline import MATCH, PRECISION
    from tilewright.models import load_model

    own = load_model(folder)
    precision = resolve_precision(own, load_precision(str(calibrated_precision(folder))))
    graph_module, _ = lower_model(own, precision, (MATCH, PRECISION), silent)
    get, get_original = (weight_source(each, each.config.max_positions) for each in (own, model))
    size: Any = {"group_tokens": STEP_TOKENS}
    student = LayeredForward(graph_module, get, tokens_ST, device, weight_of=load_values, **size)
    original = LayeredForward(prepared.graph_module, get_original, tokens_ST, device, **size)
    return tune_norms(student, original, progress)


def _print_end(
    output: Path, title: str, facts: CalibrationFacts, seconds: float, device: torch.device
) -> None:
    import torch

    from tilewright.cli.measure.measure import peak_memory_bytes
    from tilewright.cli.terminal.console import out

    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file()) / 1e6
    said = f"{title}, {facts.method}, {facts.num_tokens:,} tokens, {size:,.1f} MB, {seconds:,.0f} s"
    peak = f"peak memory {peak_memory_bytes() / 1e6:,.0f} MB"
    if device.type == _CUDA:
        peak += f", on the GPU {torch.cuda.max_memory_allocated(device) / 1e6:,.0f} MB"
    out().print(f"{output}: {said}, {peak}", soft_wrap=True)
    out().print(f"run it: tilewright run {shlex.quote(str(output))}", soft_wrap=True)


def _along(heading: str, axis: str) -> PrecisionConfig:
    plain, _, _ = heading.partition(", block_axis = ")
    return load_precision(f"{plain}, block_axis = {axis}")


def _device(named: str | None) -> torch.device:
    import torch

    if named is None:
        named = _CUDA if torch.cuda.is_available() else _CPU
    elif named == _CUDA and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no GPU; allowed: --device cpu")
    return torch.device(named)


def _sequences(model: LoadedModel, text: str, options: _CalibrateArgs) -> torch.Tensor:
    """Return the text's token ids as sequences with equal lengths.

    Raises:
        ConfigError: for a short text.
    """
    from tilewright.compiler.calibration.forward import sequences

    length = min(options.length, model.config.max_positions)
    tokens = model.tokenizer.encode(text)
    if len(tokens) < _MIN_SEQUENCES * length:
        raise ConfigError(
            f"the calibration text has {len(tokens)} tokens; allowed: {_MIN_SEQUENCES * length} "
            "or more"
        )
    return sequences(tokens, length, options.tokens)


def _importance(named: str | None) -> dict[str, torch.Tensor] | None:
    if named is None:
        return None
    from tilewright.models.checkpoints.gguf.imatrix import read_imatrix

    return read_imatrix(Path(named).expanduser())


def _facts(
    options: _CalibrateArgs,
    method: Method,
    model: LoadedModel,
    precision: PrecisionConfig,
    resolved: ResolvedPrecision,
    tokens_ST: torch.Tensor,
) -> CalibrationFacts:
    """Return the folder's origin. Equal facts give equal weights on equal devices."""
    from tilewright.compiler.calibration.norm_tuning import EPOCHS
    from tilewright.models.checkpoints.calibrated.manifest import NORM_EPOCHS, CalibrationFacts

    content, name = tokens_ST.numpy().tobytes(), options.text or _DEFAULT_TEXT
    if options.imatrix is not None:
        content, name = read_regular(Path(options.imatrix).expanduser()), options.imatrix
    settings: dict[str, float] = {}
    if method.name == "gptq":
        settings = {"damping": method.damping, "passes": method.passes, "fits_scales": 1.0}
    if options.tune_norms:
        settings[NORM_EPOCHS] = float(EPOCHS)
    is_named = precision.name != "heading" and options.precision == precision.name
    return CalibrationFacts(
        model=model.name,
        original=model.checkpoint.content_hash(),
        precision=precision.name if is_named else resolved.heading(),
        precision_id=resolved.id,
        block_axis=resolved.block_axis,
        method=method.name,
        text=name if content else "none",
        text_sha256=hashlib.sha256(content).hexdigest(),
        num_tokens=tokens_ST.numel(),
        sequence_length=tokens_ST.shape[1] if content else 0,
        settings=settings,
    )


def _shapes(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    from tilewright.models.sources import stored_shapes

    shapes = stored_shapes(model.module)
    if model.config.tie_embeddings:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    return shapes


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a callback for a bar with the time left, or for a line a minute without a terminal."""
    from rich.progress import TextColumn, TimeRemainingColumn

    from tilewright.cli.terminal.console import compile_progress, err

    console, began, stage = err(), time.monotonic(), ""
    said = began
    with compile_progress(console, TimeRemainingColumn(), TextColumn("left")) as show:

        def report(what: str, done: int, total: int) -> None:
            nonlocal said, began, stage
            show(what, done, total)
            now = time.monotonic()
            if what != stage:
                stage, began = what, now
            if not console.is_terminal and done and now - said > 60:
                said, left = now, (now - began) * (total - done) / done
                print(f"{what}: {100 * done // total} %, {left:,.0f} s left", file=sys.stderr)

        yield report
