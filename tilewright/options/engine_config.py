"""The engine configuration. A field is a flag, a keyword for `LLM` and a key in a YAML file.

Command lines and files are parsed in `arguments` and `config_file`. Models and devices on this
machine are in `resolve`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tilewright.compiler.devices import BOARDS, CPU_BACKENDS
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES
from tilewright.distributed.parallel import COLLECTIVE_BACKENDS, WIRES
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import OnOff, declared, integer, numbers, option, real

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.runtime.scheduling.request_state import SchedulerConfig
    from tilewright.runtime.speculative.config import SpeculativeConfig

AUTO, ALWAYS, NEVER = "auto", "always", "never"
TARGETS = ("reference", "null", "cpu", "cuda", *BOARDS)
MAX_INVARIANT_SEQS = 16
"""Open sequences for which batch-invariant decode steps cost a GPU nothing."""
MAX_SEQS = {"cuda": 256, "cpu": 16}
"""Largest automatic ``max_num_seqs``, by target."""
_MIN_SEQS, _MAX_MODEL_LEN, _MAX_RANKS = 8, 4096, 1024
MODEL, ENGINE, SCHEDULER, RANKS = "model", "engine", "scheduler", "several devices"
"""Headings of the help."""

LOCAL: Mapping[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": None,
    "gpu_memory_utilization": None,
    "batch_invariant": NEVER,
    "cache_output": False,
}
"""Defaults for `LLM` and commands without a server."""
SINGLE: Mapping[str, Any] = {**LOCAL, "max_num_seqs": 1}
"""Defaults for commands with a single sequence."""
BATCH: Mapping[str, Any] = {"max_prefill_ms": 0.0, "cache_output": False}
"""Defaults for ``batch``, where no stream waits for a prompt."""

_COPIES = {"auto": "auto", "none": "none", "fp8": "codes", "all": "all"}
"""``weight_copies`` in the compiler's words."""


def _seqs(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return integer(1, 4096)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: auto, or integers, 1 to 4096"
        ) from None


def speculative_json(text: str) -> str:
    """Return the text if it is a valid `SpeculativeConfig`."""
    from tilewright.runtime.speculative.config import read_speculative_config

    try:
        read_speculative_config(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine configuration. A value out of range raises ConfigError."""

    model: str | None = option(
        "Hugging Face directory, GGUF file, hub name or shape. A hub name is "
        "OWNER/NAME[@REVISION][:FILE.gguf] or smollm2. shape:NAME has random weights. Default"
        " smollm2",
        group=MODEL,
        metavar="PATH",
    )
    target: str | None = option(
        "reference, null, cpu, cuda, or an emulated board (n150, n300, t3k, tg). Default cpu",
        group=MODEL,
    )
    backend: str | None = option(
        "native kernels, onnxruntime or auto for target cpu. Native kernels need a C++ "
        "compiler or a prebuilt library. Default auto, which prefers native",
        group=MODEL,
        choices=(AUTO, *CPU_BACKENDS),
    )
    precision: str | None = option(
        "a name in precision_cfgs/, a YAML or JSON file, a heading, or auto. For quantized "
        "files auto is stored (weights as in the file), more exact under 0.5 GB on cpu. For "
        "other files auto is accuracy. Default auto, or the case's in bench",
        group=MODEL,
        metavar="NAME",
    )
    compute: str | None = option(
        "exact uses float arithmetic everywhere, without a speed claim. Default fast",
        group=MODEL,
        choices=COMPUTE_MODES,
    )
    dump: str | None = option(
        "directory for the graph after every pass", group=MODEL, metavar="DIR"
    )
    max_model_len: int | None = option(
        "maximum positions in a request with its output. Default is the model's limit, up to "
        "4096. The default in run fits the prompt and its output",
        aliases=("--max-context", "--context"),
        group=ENGINE,
        type=integer(1, 1 << 24),
        metavar="N",
    )
    max_num_batched_tokens: int | None = option(
        "maximum prompt tokens in a step. Default 8192, without a limit in LLM, run and chat",
        aliases=("--step-tokens",),
        default=8192,
        group=ENGINE,
        type=integer(1, 1 << 20),
        metavar="N",
    )
    gpu_memory_utilization: float | None = option(
        "share of GPU memory for weights and state. Default 0.92. LLM, run and chat reserve "
        "max_num_seqs full sequences",
        aliases=("--memory-fraction",),
        default=0.92,
        group=ENGINE,
        type=real(0, 1, above=True),
        metavar="X",
    )
    weight_copies: str = option(
        "dequantized weight copies for large batches on a GPU. fp8 needs --batch-invariant "
        "never. auto is all if every context still fits or three quarters of the pages "
        "remain. Else it is all but rounded copies, fp8 or none, the first that fits. fp8 needs "
        "only a third of the pages and 33 contexts. Default auto",
        aliases=("--copies",),
        renamed={"codes": "fp8"},
        default=AUTO,
        group=ENGINE,
        choices=tuple(_COPIES),
    )
    batch_invariant: str = option(
        "always makes the output independent from the batch, if the target can. never allows "
        "other prefill kernels, and FP8 on a GPU. auto is always up to 16 running requests on"
        " a GPU, and always elsewhere. Default auto, and never in LLM, run and chat",
        aliases=("--arithmetic",),
        renamed={"strict": ALWAYS, "fast": NEVER},
        default=AUTO,
        group=ENGINE,
        choices=(AUTO, ALWAYS, NEVER),
    )
    num_threads: int | None = option(
        "CPU threads, shared by all replicas. Default all cores",
        aliases=("--threads",),
        group=ENGINE,
        type=integer(1, 1024),
        metavar="N",
    )
    use_cache: bool = option(
        "read and write the cache for compiled programs",
        aliases=("--no-cache",),
        default=True,
        group=ENGINE,
    )
    speculative_config: str | None = option(
        'JSON object with vLLM\'s keys. \'{"method": "ngram"}\' drafts from earlier text, "mtp" '
        'with the draft layer in the model\'s file, "draft_model" with a smaller "model". '
        "Further keys: num_speculative_tokens (1 to 15, default 5, with mtp 3, with ngram on cpu "
        "10), prompt_lookup_max, prompt_lookup_min, num_speculative_tokens_per_batch_size and "
        "draft_precision (the draft model's --precision). Default no drafts",
        group=ENGINE,
        type=speculative_json,
        metavar="JSON",
    )
    max_num_seqs: int | None = option(
        "maximum running requests, auto or 1 to 4096. Default auto, which is up to 256 on "
        "cuda and 16 on cpu, as memory allows. Default 8 in LLM",
        aliases=("--max-seats",),
        group=SCHEDULER,
        type=_seqs,
        metavar="N",
    )
    max_prefill_ms: float = option(
        "maximum prefill milliseconds in a step with running requests. 0 disables the limit. "
        "Default 24, and 0 in batch",
        aliases=("--step-ms",),
        default=24.0,
        group=SCHEDULER,
        type=real(0, 10_000),
        metavar="MS",
    )
    enable_prefix_caching: bool = option(
        "reuse computed prompt prefixes",
        aliases=("--no-prefix-cache",),
        default=True,
        group=SCHEDULER,
    )
    cache_output: bool | None = option(
        "reuse output tokens as prefix for later prompts, equal up to rounding. Default yes "
        "if the target does not promise bits. Default no in LLM and batch",
        aliases=("--cache-replies", "--no-cache-replies"),
        action=OnOff,
        group=SCHEDULER,
    )
    swap_space: float = option(
        "host memory for preempted requests, in GB. Cached sequences take the same amount "
        "again. Default 4",
        aliases=("--host-cache",),
        default=4.0,
        group=SCHEDULER,
        metavar="GB",
        type=real(0, 1 << 20),
    )
    tensor_parallel_size: int | None = option(
        "number of ranks with a slice from every layer. A rank is a GPU, or a process on "
        "target cpu. Default 1",
        aliases=("--tensor-parallel", "--nodes"),
        group=RANKS,
        type=integer(1, _MAX_RANKS),
        metavar="N",
    )
    expert_parallel_size: int | None = option(
        "number of expert-parallel groups. Experts are distributed over the groups. Default "
        "automatic",
        aliases=("--expert-parallel",),
        group=RANKS,
        type=integer(1, _MAX_RANKS),
        metavar="E",
    )
    devices: tuple[int, ...] | None = option(
        "devices for the ranks, as 0,1. Default from 0",
        group=RANKS,
        type=numbers,
        metavar="LIST",
    )
    tensor_split: tuple[int, ...] | None = option(
        "proportions per rank, as 2,1,1. Default even",
        aliases=("--shares",),
        group=RANKS,
        type=numbers,
        metavar="LIST",
    )
    comm_dtype: str | None = option(
        "data type for all-reduce messages. Default chosen by the target",
        aliases=("--wire",),
        group=RANKS,
        choices=WIRES,
    )
    collective_backend: str | None = option(
        "transport between GPUs, p2p (peer memory) or nccl. Default p2p if supported",
        aliases=("--exchange",),
        renamed={"peers": "p2p"},
        group=RANKS,
        choices=tuple(COLLECTIVE_BACKENDS),
    )
    rank_timeout: float | None = option(
        "seconds of silence after which a rank ends the run. Default 10",
        aliases=("--peer-limit",),
        group=RANKS,
        type=real(0, 1e6, above=True),
        metavar="S",
    )
    nnodes: int | None = option(
        "number of machines. Each machine starts its own ranks. Default 1",
        group=RANKS,
        type=integer(1, _MAX_RANKS),
        metavar="N",
    )
    node_rank: int | None = option(
        "number of this machine, 0 to N - 1",
        group=RANKS,
        type=integer(0, _MAX_RANKS),
        metavar="R",
    )
    master_addr: str | None = option(
        "address of machine 0. All machines need TILEWRIGHT_TOKEN", group=RANKS, metavar="HOST"
    )
    master_port: int | None = option(
        "port of machine 0. Default 29500", group=RANKS, type=integer(1, 65535), metavar="PORT"
    )

    def __post_init__(self) -> None:
        for name, made in declared(type(self)).items():
            value = getattr(self, name)
            if value is None or (isinstance(value, bool) and _is_switch(made)):
                continue
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            try:
                if _is_switch(made) or made.read(text) != value:
                    raise argparse.ArgumentTypeError(f"{value!r}; allowed: {_allowed_text(made)}")
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Make a configuration from keywords. Older names are accepted.

        ``defaults``: Values for fields without a keyword.

        Raises:
            ConfigError: for an unknown or doubled name, or a value out of range.
        """
        options, known = declared(cls), dict[str, Any]()
        older = {_keyword(a): n for n, entry in options.items() for a in entry.aliases}
        older = {name: new for name, new in older.items() if not name.startswith("no_")}
        for key, value in values.items():
            name = key if key in options else older.get(key, "")
            if not name:
                raise ConfigError(f"unknown option {key!r}; {allowed(options, key)}")
            if name in known:
                raise ConfigError(f"{key}: given twice, also as {name}; allowed: once")
            value = str(value) if isinstance(value, Path) else value
            if isinstance(value, str):
                value = options[name].renamed.get(value, value)
            elif isinstance(value, Mapping):
                value = json.dumps(value, default=str)
            elif isinstance(value, list | tuple):
                value = tuple(value) or None
            known[name] = value
        if known.get("max_num_seqs") == AUTO:
            known["max_num_seqs"] = None
        return cls(**{**(defaults or {}), **known})

    def num_seqs(self, target: str) -> tuple[int, int | None]:
        """Return the most running requests, and the fewest if memory decides."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs, None
        most = MAX_SEQS.get(target.split("-")[0], _MIN_SEQS)
        return most, min(most, _MIN_SEQS)

    def invariance(self, target: str, num_seqs: int) -> str:
        """Return ``always``, ``never``, or ``auto``: always up to ``MAX_INVARIANT_SEQS``
        open sequences.

        Drafts count as sequences: more rows would have slower kernels.
        """
        if self.batch_invariant != AUTO:
            return self.batch_invariant
        num_rows = num_seqs * (1 + self._max_drafts())
        return AUTO if target == "cuda" and num_rows > MAX_INVARIANT_SEQS else ALWAYS

    @property
    def context(self) -> int:
        """Maximum positions in a request, before the model's limit."""
        return self.max_model_len or _MAX_MODEL_LEN

    def compile_options(self, target: str, max_positions: int) -> CompileOptions:
        """Return the values that the compiler needs, for a model of ``max_positions``.

        Raises:
            ConfigError: for a context that the model does not have.
        """
        from tilewright.compiler.targets.interface.base import CompileOptions

        if (self.max_model_len or 0) > max_positions:
            raise ConfigError(
                f"max_model_len {self.max_model_len}; allowed by this model: 1 to {max_positions}"
            )
        num_seqs, least = self.num_seqs(target)
        invariance = self.invariance(target, num_seqs)
        step_tokens = self.max_num_batched_tokens
        limits: dict[str, Any] = {} if step_tokens is None else {"max_step_tokens": step_tokens}
        return CompileOptions(
            max_batch=num_seqs,
            least_batch=least,
            max_context=min(self.context, max_positions),
            compute=self.compute or COMPUTE_MODES[0],
            num_threads=self.num_threads,
            memory_fraction=self.gpu_memory_utilization,
            is_strict=invariance == ALWAYS,
            strict_rows=MAX_INVARIANT_SEQS if invariance == AUTO else 0,
            copies=_COPIES[self.weight_copies],
            max_drafts=self._max_drafts(),
            **limits,
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """Speculative decoding options. None: no drafts."""
        from tilewright.runtime.speculative.config import read_speculative_config

        text = self.speculative_config
        return None if text is None else read_speculative_config(text)

    def _max_drafts(self) -> int:
        config = self.speculative
        return 0 if config is None else config.num_reserved

    def scheduler_config(self, *, cache_output: bool) -> SchedulerConfig:
        """Return the values that the scheduler needs."""
        from tilewright.runtime.scheduling.request_state import SchedulerConfig

        return SchedulerConfig(
            speculative=self.speculative,
            step_ms=self.max_prefill_ms,
            step_tokens=self.max_num_batched_tokens,
            reuses=self.enable_prefix_caching,
            host_bytes=int(self.swap_space * 1e9),
            cache_replies=cache_output if self.cache_output is None else self.cache_output,
        )


def _is_switch(made: Any) -> bool:
    return "action" in made.words


def _allowed_text(made: Any) -> str:
    if _is_switch(made):
        return "true or false"
    convert = made.words.get("type")
    return "text" if convert is None else "numbers"


def _keyword(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def current_flags(command: str) -> str:
    """Return a recorded command line with the current spellings of engine options."""
    spellings = {
        alias: ("--no-" if _is_switch(made) and alias.startswith("--no-") else "--")
        + name.replace("_", "-")
        for name, made in declared(EngineConfig).items()
        for alias in made.aliases
    }
    return " ".join(spellings.get(word, word) for word in command.split(" "))
