"""What ``bench compare`` is asked for: parts, each a model with what is measured of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from bench.peers import PEERS
from bench.peers.records import read_parts
from bench.peers.rounds import Plan
from tilewright.compiler.artifacts.paths import cache_dir, is_compiled
from tilewright.compiler.devices import CPU_BACKENDS, describe_cpu
from tilewright.compiler.precision import load_precision
from tilewright.errors import ConfigError, allowed
from tilewright.models import ShapeName, find_model_or_shape
from tilewright.options.arguments import integer, option, parse, real
from tilewright.utils.json_lines import check_writable

KINDS = ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Pair:
    """A configuration of ours, and the GGUF type it is compared with."""

    precision: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is measured of one model where the command line says nothing else.

    ``pairs``: by configuration, the GGUF type beside it. ``model``: None for the default one.
    """

    model: str | None = None
    pairs: Mapping[str, str]
    backends: tuple[str, ...] = ("native",)
    peers: tuple[str, ...] = ("llama.cpp",)
    prefill: tuple[int, ...] = ()
    users: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()
    decode_tokens: int = 128


_EIGHT_AND_FOUR = {"all-q40": "Q4_0", "all-q80": "Q8_0"}
PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "formats": Part(
            pairs=_EIGHT_AND_FOUR | {"all-bfp4": "Q4_0", "all-bfp8": "Q8_0", "bf16": "BF16"},
            peers=tuple(PEERS),
            prefill=(512,),
            users=(8, 32),
        ),
        "large": Part(
            model="shape:llama-3.2-1b", pairs=_EIGHT_AND_FOUR, prefill=(512,), decode_tokens=48
        ),
        "busy": Part(
            pairs={"all-q40": "Q4_0"},
            backends=tuple(CPU_BACKENDS),
            busy=(1, 2),
            decode_tokens=48,  # llama.cpp decodes 3 a second beside another process
        ),
    }
)
"""All weights with users together; a large shape, which memory bounds; beside other processes."""


def read_pair(text: str) -> Pair:
    """Read a pair ``PRECISION=TYPE``. Raises ConfigError for what is none."""
    precision, separator, kind = text.rpartition("=")
    if not separator or not precision or kind.upper() not in KINDS:
        raise ConfigError(f"pair {text!r}; {allowed(f'PRECISION={kind}' for kind in KINDS)}")
    load_precision(precision)
    return Pair(precision, kind.upper())


def _peer(name: str) -> str:
    return PEERS[name].name


def _onnx_folder(text: str) -> Path:
    path = Path(text)
    if not (path / "genai_config.json").is_file():
        builder = "python -m onnxruntime_genai.models.builder -i FOLDER -o DIR -p int4 -e cpu"
        raise ConfigError(f"{text}: holds no genai_config.json; allowed: a folder of {builder}")
    return path.resolve()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The command line of ``python -m bench compare``; None where a part decides."""

    parts: tuple[str, ...] | None = option(
        "one or more; formats: the default model in 4, 8 and 16 bits, prompts, one user, 8 and 32; "
        "large: a shape of 1.2 billion parameters; busy: both backends beside one and two other "
        "processes (default: all; with --model formats)",
        nargs="+",
        metavar="NAME",
        choices=tuple(PARTS),
    )
    model: str | None = option(
        "as of tilewright run; some peers need a GGUF file, as which a shape of Llama is written",
        metavar="PATH",
    )
    pairs: tuple[Pair, ...] | None = option(
        f"a configuration and the GGUF type beside it: {', '.join(KINDS)} (default: the part's)",
        nargs="+",
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    peers: tuple[str, ...] | None = option(
        f"of {', '.join(PEERS)} (default: of formats all, else llama.cpp)",
        nargs="*",
        metavar="NAME",
        type=_peer,
    )
    backends: tuple[str, ...] | None = option(
        f"of the target cpu: {', '.join(CPU_BACKENDS)} (default: native; of busy both)",
        nargs="+",
        metavar="NAME",
        choices=tuple(CPU_BACKENDS),
    )
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("in turn (7)", default=7, type=integer(1, 1000))
    minutes: float | None = option(
        "for the rounds of a part: none is begun that would end behind them",
        metavar="M",
        type=real(0, 1e4, above=True),
    )
    prefill: tuple[int, ...] | None = option(
        "lengths of prompts (default: 512)",
        nargs="+",
        metavar="TOKENS",
        type=integer(1, 1 << 20),
    )
    context: int = option(
        "a prompt that is decoded after", default=128, metavar="TOKENS", type=integer(1, 1 << 20)
    )
    users: tuple[int, ...] | None = option(
        "that decode together (default: 8 32)", nargs="*", metavar="N", type=integer(2, 256)
    )
    busy: tuple[int, ...] | None = option(
        "other processes, each of which keeps a core busy (default: none; of busy 1 2)",
        nargs="*",
        metavar="N",
        type=integer(1, 1024),
    )
    decode_tokens: int | None = option(
        "of one user; of several a fourth each (default: 128; of large and busy 48)",
        metavar="N",
        type=integer(3, 1 << 20),
    )
    onnx_genai_folder: Path | None = option(
        "as its builder wrote it (default: build one)", metavar="DIR", type=_onnx_folder
    )
    timeout: float = option(
        "of one answer", default=600.0, metavar="S", type=real(0, 1e6, above=True)
    )
    json: str | None = option(
        "keep every repeat, versions and host; other parts of the file stay", metavar="FILE"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """A part with all that it takes: ``model`` is a path, ``shape`` the name of what was written
    there, if it was; ``backends`` are of target cpu, ``peers`` names in `PEERS`, ``json`` the file
    that its record goes to.
    """

    part: str
    model: str
    shape: str | None
    pairs: tuple[Pair, ...]
    backends: tuple[str, ...]
    peers: tuple[str, ...]
    num_threads: int
    plan: Plan
    onnx_genai_folder: Path | None
    timeout: float
    json: str | None


def read_options(argv: Sequence[str]) -> list[CompareOptions]:
    """Read and check the command line: an entry a part, in order. Raises TilewrightError."""
    asked = parse(
        _Asked,
        argv,
        prog="python -m bench compare",
        description="Measure Tilewright's CPU target and its peers in turn on the same weights.",
    )
    if asked.json is not None:
        check_writable(asked.json)
        read_parts(Path(asked.json))  # before anything is measured that could not be kept there
    names = asked.parts or (tuple(PARTS) if asked.model is None else tuple(PARTS)[:1])
    return [_options_of(name, PARTS[name], asked) for name in dict.fromkeys(names)]


def _options_of(name: str, part: Part, asked: _Asked) -> CompareOptions:
    pairs = asked.pairs or tuple(Pair(*pair) for pair in part.pairs.items())
    plan = Plan(
        prefill_lengths=tuple(dict.fromkeys(asked.prefill or part.prefill)),
        context=asked.context,
        num_decoded=asked.decode_tokens or part.decode_tokens,
        num_rounds=asked.rounds,
        users=tuple(dict.fromkeys(part.users if asked.users is None else asked.users)),
        busy=tuple(dict.fromkeys(part.busy if asked.busy is None else asked.busy)),
        max_seconds=None if asked.minutes is None else 60 * asked.minutes,
    )
    path, shape = _found(asked.model or part.model)
    return CompareOptions(
        part=name,
        model=path,
        shape=shape,
        pairs=tuple(dict.fromkeys(pairs)),
        backends=asked.backends or part.backends,
        peers=part.peers if asked.peers is None else asked.peers,
        num_threads=asked.threads or describe_cpu().num_cores,
        plan=plan,
        onnx_genai_folder=asked.onnx_genai_folder,
        timeout=asked.timeout,
        json=asked.json,
    )


def _found(model: str | None) -> tuple[str, str | None]:
    """The path of a model, and the name of the shape that is written there if it is one."""
    if model is not None and is_compiled(model):
        raise ConfigError(
            f"{model}: a compiled folder has no weights for others to run; allowed: a checkpoint"
        )
    found = find_model_or_shape(model)
    if not isinstance(found, ShapeName):
        return str(found.resolve()), None
    from bench.peers.shape_gguf import cached_shape

    return str(cached_shape(found, cache_dir() / "peers").resolve()), str(found)
