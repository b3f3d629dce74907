"""The configuration of an engine. A field is a flag, a keyword of `LLM` and a key of a YAML file.

Parsing of command lines and files is in `arguments` and `config_file`. The models and devices of
this machine are in `resolve`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tilewright.compiler.devices import BOARDS, CPU_BACKENDS
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES
from tilewright.distributed.parallel import COLLECTIVE_BACKENDS, WIRES
from tilewright.errors import ConfigError, allowed
from tilewright.options.arguments import OnOff, declared, integer, numbers, option, real

if TYPE_CHECKING:
    from tilewright.compiler.targets.interface.base import CompileOptions
    from tilewright.runtime.scheduling.request_state import Policy

AUTO, ALWAYS, NEVER = "auto", "always", "never"
TARGETS = ("reference", "null", "cpu", "cuda", *BOARDS)
FEW_SEQS = 16
"""Number of open sequences up to which batch-invariant decode steps cost a GPU nothing."""
MAX_SEQS = {"cuda": 256, "cpu": 16}
"""Largest ``max_num_seqs`` of ``auto``, by target."""
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
"""Defaults of `LLM` and of commands without a server."""
SINGLE: Mapping[str, Any] = {**LOCAL, "max_num_seqs": 1}
"""Defaults of commands that run a single sequence."""
BATCH: Mapping[str, Any] = {"max_prefill_ms": 0.0, "cache_output": False}
"""Defaults of ``batch``: no stream waits for a prompt."""

_COPIES = {"auto": "auto", "none": "none", "fp8": "codes", "all": "all"}
"""``weight_copies``, and the words of the compiler for them."""


def _seqs(text: str) -> int | None:
    if text == AUTO:
        return None
    try:
        return integer(1, 4096)(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: auto, or integers, 1 to 4096"
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of an engine. A value out of range raises ConfigError."""

    model: str | None = option(
        "a Hugging Face directory, a GGUF file, a name on the Hugging Face hub "
        "(OWNER/NAME[@REVISION][:FILE.gguf]), smollm2, or shape:NAME for random weights of a "
        "known shape, as shape:llama-3.1-8b (default: smollm2)",
        group=MODEL,
        metavar="PATH",
    )
    target: str | None = option(
        "reference, null, cpu, cuda, or an emulated board: n150, n300, t3k, tg (default: cpu)",
        group=MODEL,
    )
    backend: str | None = option(
        "implementation of target cpu: native (kernels built with this machine's C++ compiler), "
        "onnxruntime, or auto: native if a build is possible, else onnxruntime (default: auto)",
        group=MODEL,
        choices=(AUTO, *CPU_BACKENDS),
    )
    precision: str | None = option(
        "a name in precision_cfgs/, a YAML or JSON file, a heading, or auto: stored (weights as "
        "in the file) for quantized files, with float prefill under 0.5 GB; accuracy for others "
        "(default: auto; bench: the case's)",
        group=MODEL,
        metavar="NAME",
    )
    compute: str | None = option(
        "exact: float arithmetic everywhere, without a speed claim (default: fast)",
        group=MODEL,
        choices=COMPUTE_MODES,
    )
    dump: str | None = option(
        "directory for the graph after every pass", group=MODEL, metavar="DIR"
    )
    max_model_len: int | None = option(
        f"maximum positions of a request, prompt and output (default: the model's, up to "
        f"{_MAX_MODEL_LEN}; run: the length of prompt and output)",
        aliases=("--max-context", "--context"),
        group=ENGINE,
        type=integer(1, 1 << 24),
        metavar="N",
    )
    max_num_batched_tokens: int | None = option(
        "maximum prompt tokens of a step (default: 8192; LLM, run, chat: no limit)",
        aliases=("--step-tokens",),
        default=8192,
        group=ENGINE,
        type=integer(1, 1 << 20),
        metavar="N",
    )
    gpu_memory_utilization: float | None = option(
        "share of a GPU's memory for weights and state (default: 0.92; LLM, run, chat: memory for "
        "max_num_seqs full sequences)",
        aliases=("--memory-fraction",),
        default=0.92,
        group=ENGINE,
        type=real(0, 1, above=True),
        metavar="X",
    )
    weight_copies: str = option(
        "dequantized weight copies for large batches on a GPU: auto (all if every context still "
        "fits or three quarters of the pages remain, else fp8), none, fp8 (only if not "
        "batch-invariant), or all (default: auto)",
        aliases=("--copies",),
        renamed={"codes": "fp8"},
        default=AUTO,
        group=ENGINE,
        choices=tuple(_COPIES),
    )
    batch_invariant: str = option(
        "always: output does not depend on the batch, if the target supports it; never: prompts "
        "may use other kernels, and a GPU may multiply bfp4 weights at lofi in FP8; auto: always, "
        f"but never on a GPU with more than {FEW_SEQS} running requests (default: auto; LLM, run, "
        "chat: never)",
        aliases=("--arithmetic",),
        renamed={"strict": ALWAYS, "fast": NEVER},
        default=AUTO,
        group=ENGINE,
        choices=(AUTO, ALWAYS, NEVER),
    )
    num_threads: int | None = option(
        "CPU threads; of all replicas in total (default: all cores)",
        aliases=("--threads",),
        group=ENGINE,
        type=integer(1, 1024),
        metavar="N",
    )
    use_cache: bool = option(
        "read and write the cache of compiled programs",
        aliases=("--no-cache",),
        default=True,
        group=ENGINE,
    )
    max_num_seqs: int | None = option(
        "maximum running requests: auto, or 1 to 4096 (default: auto, which is up to "
        f"{MAX_SEQS['cuda']} on cuda and {MAX_SEQS['cpu']} on cpu, as memory allows; LLM: 8)",
        aliases=("--max-seats",),
        group=SCHEDULER,
        type=_seqs,
        metavar="N",
    )
    max_prefill_ms: float = option(
        "maximum milliseconds of prefill in a step with running requests. 0: no limit (default: "
        "20; batch: 0)",
        aliases=("--step-ms",),
        default=20.0,
        group=SCHEDULER,
        type=real(0, 10_000),
        metavar="MS",
    )
    enable_prefix_caching: bool = option(
        "reuse computed prefixes of prompts",
        aliases=("--no-prefix-cache",),
        default=True,
        group=SCHEDULER,
    )
    cache_output: bool | None = option(
        "reuse output tokens as prefix of later prompts; equal up to rounding (default: if the "
        "target promises no bits, else no; LLM, batch: no)",
        aliases=("--cache-replies", "--no-cache-replies"),
        action=OnOff,
        group=SCHEDULER,
    )
    swap_space: float = option(
        "host memory for preempted requests, in GB; the same amount again holds cached sequences "
        "(default: 4)",
        aliases=("--host-cache",),
        default=4.0,
        group=SCHEDULER,
        metavar="GB",
        type=real(0, 1 << 20),
    )
    tensor_parallel_size: int | None = option(
        "number of ranks, each with a slice of every layer: GPUs of target cuda, processes of "
        "target cpu (default: 1)",
        aliases=("--tensor-parallel", "--nodes"),
        group=RANKS,
        type=integer(1, _MAX_RANKS),
        metavar="N",
    )
    expert_parallel_size: int | None = option(
        "number of expert-parallel groups; experts are distributed over them (default: automatic)",
        aliases=("--expert-parallel",),
        group=RANKS,
        type=integer(1, _MAX_RANKS),
        metavar="E",
    )
    devices: tuple[int, ...] | None = option(
        "devices of the ranks, as 0,1 (default: from 0)",
        group=RANKS,
        type=numbers,
        metavar="LIST",
    )
    tensor_split: tuple[int, ...] | None = option(
        "proportions of the model per rank, as 2,1,1 (default: even)",
        aliases=("--shares",),
        group=RANKS,
        type=numbers,
        metavar="LIST",
    )
    comm_dtype: str | None = option(
        "data type of all-reduce messages (default: chosen by the target)",
        aliases=("--wire",),
        group=RANKS,
        choices=WIRES,
    )
    collective_backend: str | None = option(
        "transport between GPUs: p2p (peer memory) or nccl (default: p2p if supported)",
        aliases=("--exchange",),
        renamed={"peers": "p2p"},
        group=RANKS,
        choices=tuple(COLLECTIVE_BACKENDS),
    )
    rank_timeout: float | None = option(
        "seconds without a sign of life after which a rank ends the run (default: 10)",
        aliases=("--peer-limit",),
        group=RANKS,
        type=real(0, 1e6, above=True),
        metavar="S",
    )
    nnodes: int | None = option(
        "number of machines; each starts its own ranks (default: 1)",
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
        "address of machine 0; all machines need TILEWRIGHT_TOKEN", group=RANKS, metavar="HOST"
    )
    master_port: int | None = option(
        "port of machine 0 (default: 29500)", group=RANKS, type=integer(1, 65535), metavar="PORT"
    )

    def __post_init__(self) -> None:
        for name, made in declared(type(self)).items():
            value = getattr(self, name)
            if value is None or (isinstance(value, bool) and _is_switch(made)):
                continue
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            try:
                if _is_switch(made) or made.read(text) != value:
                    raise argparse.ArgumentTypeError(f"{value!r}; allowed: {_kind_of(made)}")
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{name}: {error}") from None

    @classmethod
    def of(cls, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Self:
        """Make a configuration of keywords. Older names are accepted.

        ``defaults``: Values of fields that ``values`` omits.

        Raises:
            ConfigError: for an unknown or doubled name, or a value out of range.
        """
        options, found = declared(cls), dict[str, Any]()
        older = {_keyword(a): n for n, each in options.items() for a in each.aliases}
        older = {name: new for name, new in older.items() if not name.startswith("no_")}
        for key, value in values.items():
            name = key if key in options else older.get(key, "")
            if not name:
                raise ConfigError(f"unknown option {key!r}; {allowed(options, key)}")
            if name in found:
                raise ConfigError(f"{key}: given twice, also as {name}; allowed: once")
            value = str(value) if isinstance(value, Path) else value
            if isinstance(value, str):
                value = options[name].renamed.get(value, value)
            elif isinstance(value, list | tuple):
                value = tuple(value) or None
            found[name] = value
        if found.get("max_num_seqs") == AUTO:
            found["max_num_seqs"] = None
        return cls(**{**(defaults or {}), **found})

    def num_seqs(self, target: str) -> tuple[int, int | None]:
        """Return the maximum number of running requests, and the minimum if memory decides."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs, None
        most = MAX_SEQS.get(target.split("-")[0], _MIN_SEQS)
        return most, min(most, _MIN_SEQS)

    def invariance(self, target: str, num_seqs: int) -> str:
        """Return ``always``, ``never``, or ``auto``: always up to ``FEW_SEQS`` open sequences."""
        if self.batch_invariant != AUTO:
            return self.batch_invariant
        return AUTO if target == "cuda" and num_seqs > FEW_SEQS else ALWAYS

    @property
    def context(self) -> int:
        """Maximum positions of a request, before the model's limit."""
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
            strict_rows=FEW_SEQS if invariance == AUTO else 0,
            copies=_COPIES[self.weight_copies],
            **limits,
        )

    def scheduler_config(self, *, cache_output: bool) -> Policy:
        """Return the values that the scheduler needs."""
        from tilewright.runtime.scheduling.request_state import Policy

        return Policy(
            step_ms=self.max_prefill_ms,
            step_tokens=self.max_num_batched_tokens,
            reuses=self.enable_prefix_caching,
            host_bytes=int(self.swap_space * 1e9),
            cache_replies=cache_output if self.cache_output is None else self.cache_output,
        )


FIELDS = tuple(each.name for each in fields(EngineConfig))


def _is_switch(made: Any) -> bool:
    return "action" in made.words


def _kind_of(made: Any) -> str:
    if _is_switch(made):
        return "true or false"
    kind = made.words.get("type")
    return "text" if kind is None else "numbers"


def _keyword(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
