"""Compiles and measures a loaded model for ``tilewright bench``, without arguments and output."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.api import compile, open_draft_model
from tilewright.cli.arguments.bench import RunOptions
from tilewright.compiler.devices import DEVICES, describe_cpu
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import PrecisionSummary, load_precision
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, Progress
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.errors import ConfigError, RequestError
from tilewright.evaluate.cases.cases import ACCURACY_CONTEXT, check_case
from tilewright.evaluate.cases.prompts import AccuracyText, accuracy_text, cut_prompts
from tilewright.evaluate.cases.reference import (
    AccuracyReference,
    ReferenceMismatchError,
    Subject,
    build_reference,
    cached_logits,
    keep_logits,
    load_reference,
    reference_bytes,
    reference_path,
    text_hash,
    text_tokens,
    write_cache,
)
from tilewright.evaluate.measure import accuracy
from tilewright.evaluate.measure.drafts import count_drafts
from tilewright.evaluate.measure.timing import TimedRequest, TimedRun, sampling_text
from tilewright.evaluate.results.record import Accuracy, ContractLine, Drafts, Result, medians
from tilewright.loading.source import ModelHandle
from tilewright.models import LoadedModel
from tilewright.runtime.speculative.config import draft_note
from tilewright.runtime.speculative.draft_model import DraftModel
from tilewright.utils.environment import environment
from tilewright.utils.files import cache_dir


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A run's requests, and the context for them."""

    jobs: tuple[TimedRequest, ...]
    context: int


def is_emulated(source: ModelHandle, options: RunOptions) -> bool:
    """Return whether the target emulates a board."""
    name = options.model.target if source.manifest is None else source.manifest.target
    return get_target(name).is_emulated


def plan_jobs(source: ModelHandle, options: RunOptions, *, max_groups: int = 1) -> BenchPlan:
    """Return the prompts as token ids, with a request per user.

    Args:
        source: the opened model.
        options: the checked command line.
        max_groups: maximum data-parallel groups.

    Raises:
        ConfigError: if the case does not fit the model or the device, if the accuracy text is too
            short, or for accuracy with random weights.
        RequestError: if a prompt and its answer do not fit the context.
        CheckpointError: for accuracy of a compiled directory without a reference.
    """
    case, limit = options.case, source.max_positions
    if not case.is_natural or case.data_parallel > 1:
        check_case(case, max_context=limit, max_data_parallel=max_groups)
    prompts = _prompt_tokens(source, options)
    end_tokens = tuple(source.tokenizer.eos_ids) if case.stop_at_eos else ()
    jobs = []
    for index, (tokens, wanted) in enumerate(prompts):
        if len(tokens) + wanted > limit:
            raise RequestError(
                f"prompt {index + 1} has {len(tokens)} tokens and {wanted} are to be generated; "
                f"allowed by this model's context: {limit} together"
            )
        sampling = replace(options.sampling, max_tokens=wanted, stop_token_ids=end_tokens)
        jobs.append(TimedRequest(tuple(tokens), sampling))
    context = max(len(job.prompt) + job.sampling.max_tokens for job in jobs)
    if case.token_accuracy:
        text = options.accuracy_text
        subject, _ = subject_of(source, text)
        truth = source.original or source
        if truth.model is None and known_reference(subject, text) is None:
            truth.checkpoint_model()
        context = max(context, ACCURACY_CONTEXT)
    return BenchPlan(tuple(jobs), context)


def _prompt_tokens(source: ModelHandle, options: RunOptions) -> list[tuple[list[int], int]]:
    """Return token ids and the token count to generate, for every user."""
    case, tokenizer = options.case, source.tokenizer
    most = case.max_generated_tokens
    if case.prompt_length is not None:
        tokens = tokenizer.encode(options.text)
        cut = cut_prompts(tokens, num_prompts=case.batch_size, prompt_length=case.prompt_length)
        return [(prompt, most) for prompt in cut]
    found = []
    for index in range(case.batch_size):
        prompt = options.prompts[index % len(options.prompts)]
        text = prompt.text
        if tokenizer.has_chat_template:
            text = tokenizer.apply_chat_template([{"role": "user", "content": text}])
        tokens = tokenizer.encode(text, add_special=not tokenizer.has_chat_template)
        found.append((tokens, min(most, prompt.max_tokens or most)))
    return found


def compile_for(
    source: ModelHandle, options: RunOptions, plan: BenchPlan, progress: Progress
) -> tuple[Compiled, Executable | None]:
    """Compile the model for the batch and the context. Compile a draft model before the model."""
    model = options.model.changed(max_num_seqs=options.case.batch_size, max_model_len=plan.context)
    draft = open_draft_model(source, model, progress=progress)
    return compile(source, model, progress=progress, ends_process=True), draft


def check_drafts(source: ModelHandle, options: RunOptions) -> None:
    """Refuse drafts of random weights.

    Raises:
        ConfigError: as above.
    """
    if options.model.config.speculative_config is not None and source.weights == "random":
        raise ConfigError(
            f"--speculative-config with {source.path}: random weights have no acceptance; allowed: "
            "a checkpoint"
        )


def _measure_drafts(
    options: RunOptions,
    executable: Executable,
    jobs: Sequence[TimedRequest],
    draft: Executable | None,
) -> Drafts | None:
    """Measure the acceptance of configured drafts and close a draft model. None: no drafts.

    Raises:
        ConfigError: if the target verifies no drafts.
    """
    config = options.model.config.speculative
    if config is None:
        return None
    if (text := draft_note(config, executable.capabilities)) is not None:
        raise ConfigError(f"{text.partition(';')[0]}; allowed: without --speculative-config")
    model = None if draft is None else DraftModel(draft)
    drafts = count_drafts(executable, jobs, config, model)
    if model is not None:
        model.close()
    return drafts


def measure_accuracy(
    source: ModelHandle, compiled: Compiled, progress: Progress, *, text: AccuracyText | None = None
) -> Accuracy:
    """Measure teacher-forced accuracy against the fp32 reference, paired with the base.

    ``text`` is predicted. None: the standard text.

    Raises:
        CheckpointError: if a reference is needed and there is no checkpoint.
    """
    text = text or accuracy_text()
    reference, logits = find_reference(source, progress, text=text)
    predictions = accuracy.teacher_force(
        compiled.executable,
        reference,
        logits,
        on_step=lambda done, total: progress("accuracy", done, total),
    )
    key = partial(
        accuracy.predictions_key,
        compiled.executable,
        target=compiled.target,
        compute=compiled.compute,
    )
    base_id = load_precision(accuracy.BASE).resolve(source.num_layers, source.name).id
    own_id, base, base_name = compiled.precision.id, None, accuracy.BASE
    if source.original is not None:  # the base of calibrated weights is round to nearest
        base, base_name = accuracy.recall(reference, key(precision_id=own_id)), "round to nearest"
        own_id = f"{own_id}-{source.content_hash[:12]}"
    elif own_id != base_id:
        base = accuracy.recall(reference, key(precision_id=base_id))
    accuracy.remember(predictions, reference, key(precision_id=own_id))
    return accuracy.score(predictions, reference, base=base, base_name=base_name, text=text.name)


def subject_of(source: ModelHandle, text: AccuracyText | None = None) -> tuple[Subject, list[int]]:
    """Return the identity of a reference for this model, and the accuracy text's tokens.

    Raises:
        ConfigError: for random weights, or for a text with too few tokens.
    """
    source = source.original or source
    if source.weights == "random":
        raise ConfigError(
            f"accuracy of {source.path}: random weights have none; allowed: a checkpoint, or a "
            "case without token accuracy, as performance-ci-1"
        )
    tokens = text_tokens(source.tokenizer.encode, (text or accuracy_text()).content)
    tokenizer_hash = source.tokenizer.content_hash()
    subject = Subject(source.name, source.content_hash, tokenizer_hash, text_hash(tokens))
    return subject, tokens


def find_reference(
    source: ModelHandle, progress: Progress, *, text: AccuracyText | None = None
) -> tuple[AccuracyReference, Tensor | None]:
    """Return the model's reference on a text with its logits. Build a missing reference.

    A compiled directory has no weights for logits, so they are None without a cached copy.

    Raises:
        CheckpointError: if a compiled directory's reference is missing.
    """
    text, source = text or accuracy_text(), source.original or source
    subject, tokens = subject_of(source, text)

    def build() -> tuple[AccuracyReference, Tensor]:
        executable = compile_reference(source.checkpoint_model(), progress)
        progress("reference", 0, 1)
        built = build_reference(executable, subject, tokens)
        executable.close()
        return built

    known = known_reference(subject, text)
    if known is None:
        reference, logits = build()
        write_cache(_kept_path(subject, text), reference_bytes(reference))
        return reference, keep_logits(reference, logits)
    found = cached_logits(known)
    if found is None and source.model is not None:
        found = keep_logits(known, build()[1])
    return known, found


def known_reference(subject: Subject, text: AccuracyText) -> AccuracyReference | None:
    """Return a model's versioned reference, else the cached reference, else None.

    A versioned file of another model or tokenizer is not used. Versioned files have the standard
    text.
    """
    for path in (reference_path(subject.model), _kept_path(subject, text)):
        if path.is_file():
            try:
                return load_reference(path, subject)
            except ReferenceMismatchError:
                continue  # another checkpoint with this name has a different hash
    return None


def _kept_path(subject: Subject, text: AccuracyText) -> Path:
    name = f"{subject.model}-{subject.model_hash[:12]}"
    if not text.is_standard:
        name += f"-{subject.text_hash[:12]}"
    return reference_path(name, cache_dir() / "references")


def compile_reference(model: LoadedModel, progress: Progress) -> Executable:
    """Compile the model in fp32 on the reference target, for a sequence of the accuracy text."""
    compiled = compile_model(
        model,
        load_precision("reference"),
        target="reference",
        options=CompileOptions(max_context=ACCURACY_CONTEXT),
        progress=progress,
    )
    return compiled.executable


def peak_memory_bytes() -> int:
    """Return this process's peak resident memory, in bytes."""
    # getrusage starts with the parent process's peak, /proc does not.
    status = Path("/proc/self/status")
    if status.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def make_result(
    source: ModelHandle,
    options: RunOptions,
    compiled: Compiled,
    runs: Sequence[TimedRun],
    *,
    plan: BenchPlan,
    draft: Executable | None = None,
) -> Result:
    """Return the record of a timed run with its drafts, without its accuracy."""
    jobs = plan.jobs
    repeats = tuple(run.repeat for run in runs)
    device, detail = device_of(compiled, options.model.config.num_threads)
    # All requests' positions at the end.
    positions = sum(len(job.prompt) + job.sampling.max_tokens - 1 for job in jobs)
    return describe(
        source,
        options,
        plan,
        compiled.precision,
        compiled.executable.contract,
        device=device,
        device_detail=detail,
        target=compiled.target,
        mesh=compiled.executable.mesh,
        num_generated=max((len(output) for run in runs for output in run.outputs), default=0),
        compute="exact" if compiled.compute == "exact" else "fast",
        repeats=repeats,
        peak_memory_bytes=peak_memory_bytes(),
        resident_bytes=compiled.executable.memory().weights,
        cache_bytes=compiled.executable.state_bytes(positions, len(jobs)),
        drafts=_measure_drafts(options, compiled.executable, jobs, draft),
        **medians(repeats),
    )


def describe(
    source: ModelHandle,
    options: RunOptions,
    plan: BenchPlan,
    precision: PrecisionSummary,
    contract: NumericContract,
    **figures: Any,
) -> Result:
    """Return the record of a run in this environment. ``figures`` are the measured fields."""
    case, (calibration, original) = options.case, source.calibration
    return Result(
        case=f"{case.name}*" if options.is_case_changed else case.name,
        model=source.name,
        weights=source.weights,
        model_hash=original or source.content_hash,
        calibration=calibration,
        dp=case.data_parallel,
        batch=case.batch_size,
        prompt_length=max(len(job.prompt) for job in plan.jobs),
        context=plan.context,
        precision_name=precision.name,
        precision_id=precision.id,
        heading=precision.heading,
        effective_id=contract.effective_id,
        sampling=sampling_text(plan.jobs[0].sampling),
        command=options.command,
        contract=tuple(
            ContractLine(
                field=entry.field,
                requested=entry.requested,
                status=entry.meaning.status,
                effective=entry.meaning.effective,
                layers=entry.layers,
            )
            for entry in contract.entries
        ),
        **asdict(environment(hash_host=True)),
        **figures,
    )


def device_of(compiled: Compiled, threads: int | None) -> tuple[str, str]:
    """Return the device of a result and its description.

    A device in `DEVICES` has its name from there, for example ``H200`` for ``NVIDIA H200``.
    """
    executable = compiled.executable
    own = executable.device_name
    known = (each.name for each in DEVICES.values() if each.target == compiled.target)
    name = next((each for each in known if re.search(rf"\b{re.escape(each)}\b", own)), own)
    plain = name.translate(str.maketrans("", "", "()|"))  # characters with a meaning in PERF.md
    cpu = describe_cpu()
    detail = executable.device_detail or cpu.model_name
    if detail.startswith(cpu.model_name):  # a CPU backend adds the used instructions
        detail += f", {threads or cpu.num_cores} threads"
    return plain.strip() or "unknown", detail
