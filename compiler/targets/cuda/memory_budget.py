"""The GPU, the memory that a model needs, and sizes that fit."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace

import torch

from tilewright.compiler.targets.cuda.graphs.capture import decode_buckets, prompt_buckets
from tilewright.compiler.targets.cuda.graphs.mixed_graphs import USUAL_OF_MIXERS, Passes, passes_for
from tilewright.compiler.targets.cuda.invariance import invariant_of
from tilewright.compiler.targets.cuda.numerics import cache_kind, tiles
from tilewright.compiler.targets.cuda.plan import far_of, has_mixers
from tilewright.compiler.targets.cuda.state.pages import PAGE, page_bytes, pages_of
from tilewright.compiler.targets.cuda.state.snapshot_positions import MOST_MARKS
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.steps.mixers import mixer_bytes
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds, copy_bytes, kinds_for
from tilewright.compiler.targets.cuda.weights.experts import held_sizes
from tilewright.compiler.targets.cuda.weights.stream import wanted_by
from tilewright.compiler.targets.interface.base import Capabilities, CompileOptions
from tilewright.compiler.targets.program.instructions import OPERAND, KernelProgram
from tilewright.distributed.world import place_of
from tilewright.errors import CompileError

_WORKSPACE = 2 << 30
"""Bytes left to the library, to captured graphs and to the context."""
_FEW_ROWS = 64
_CELL, _CELL_OF_MIXERS = 256, 1024
"""Tokens of a prompt that are worth reading the weights for; experts need more of them."""
_JOINED, _JOINED_OF_MIXERS = 8, 4
"""Pieces of prompts of a batch: faster than one after another, with bits of their own; each has
room for its marks where there are any.
"""
_LEAST_PROMPT = 1024
"""Tokens of a prompt that a step has room for, whatever is asked: a cell of any model."""
_MAX_SNAPSHOTS = 512
_SHARE_OF_SNAPSHOTS = 8
_SHARE_OF_MORE = 4
"""Of the memory that pages would have without, what snapshots take at least, and others at most."""
_DRAFT_STATES = 32
"""Per-sequence states for drafts in flight. They limit the drafts of a pass."""
_MOST_SHARED = 8192
"""Maximum number of prefill tokens of a mixed batch with mixers."""
_GB = 1e9


def open_device(options: CompileOptions | None = None) -> torch.device:
    """Find the current GPU, or the one that was named or is a rank's own, which becomes the current
    one; the CPU where Triton's interpreter is asked for.

    Raises:
        CompileError: where there is neither, or a rank has no GPU.
    """
    if torch.cuda.is_available():
        if options is not None and (options.parallel.tensor > 1 or options.parallel.devices):
            torch.cuda.set_device(_device_of_rank(options))
        return torch.device("cuda", torch.cuda.current_device())
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    raise CompileError(
        "target cuda: this machine has no GPU that torch can use; allowed: --target cpu or "
        "reference, or a machine with an NVIDIA GPU and a CUDA build of torch"
    )


def _device_of_rank(options: CompileOptions) -> int:
    """The rank's of the devices that were named, else as many as it is on its machine."""
    devices, count = options.parallel.devices, torch.cuda.device_count()
    place = place_of()
    index = devices[options.rank] if devices else 0 if place is None else place.local_rank
    if index >= count:
        raise CompileError(
            f"rank {options.rank} on GPU {index}: this process sees {count}; allowed: 0 to "
            f"{count - 1}"
        )
    return index


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What there is room for: pages of the pool, and weights held once more."""

    num_pages: int
    copies: Kinds


def check_room(plan: KernelProgram, options: CompileOptions, device: torch.device) -> MemoryBudget:
    """Refuse, before anything is loaded, what cannot fit into the GPU's free memory.

    Raises:
        CompileError: with the bytes needed and the largest context or batch that would fit.
    """
    free = free_bytes(options, device)
    copies = copies_in(plan, options, free)
    size = copy_bytes(plan, copies)
    if options.memory_fraction is not None and device.type == "cuda":
        return MemoryBudget(shared_pages(plan, options, free, size), copies)
    check_fits(plan, options, free, size)
    return MemoryBudget(options.max_batch * pages_of(options.max_context), copies)


def copies_in(plan: KernelProgram, options: CompileOptions, free: int) -> Kinds:
    """Which weights are held once more with so many free bytes: as ``options.copies`` has it; where
    not all have room, e4m3 codes alone, which gain most for their bytes.
    """
    kinds = kinds_for(options)
    if options.copies != "auto":
        return kinds
    room = free - weight_bytes(plan) - work_bytes(plan, options)
    for each in (kinds, Kinds(codes=kinds.codes)):
        size = copy_bytes(plan, each)
        if size and _has_room_for(size, plan, options, room):
            return each
    return NO_COPIES


def _has_room_for(size: int, plan: KernelProgram, options: CompileOptions, room: int) -> bool:
    """Whether something more leaves every context its room, or pages three quarters of theirs, and
    room for a whole context.
    """
    if size + state_bytes(plan, options) <= room:
        return True
    if options.memory_fraction is None:
        return False
    before, left = (_left_to_pages(plan, options, each) for each in (room, room - size))
    one = pages_of(options.max_context) * _page_bytes(plan, options)
    return left >= max(one, before - before // _SHARE_OF_MORE)


def with_passes_that_fit(
    plan: KernelProgram, options: CompileOptions, device: torch.device
) -> CompileOptions:
    """The options with the largest pass that several prompts share beside which there is room: a
    smaller one rather than none, and beside copies of weights that are asked for. Ranks, whose room
    may differ, share the least of theirs.
    """
    if most_shared(plan, options) <= USUAL_OF_MIXERS:
        return options
    usual = replace(options, max_shared_tokens=USUAL_OF_MIXERS)
    least = work_bytes(plan, usual)
    room = free_bytes(options, device) - weight_bytes(plan) - least
    if options.copies != "auto":
        room -= copy_bytes(plan, kinds_for(options))
    for size in reversed(_passes(plan, options)[-1][1]):
        found = replace(options, max_shared_tokens=size)
        if _has_room_for(work_bytes(plan, found) - least, plan, options, room):
            return found
    return usual


def capabilities_of(
    plan: KernelProgram,
    options: CompileOptions,
    device: torch.device,
    num_pages: int,
    reserved: int = 0,
) -> Capabilities:
    """Return what steps may be; ``reserved`` bytes of the free memory are taken."""
    invariant, mixes = invariant_of(plan, options, device), has_mixers(plan)
    is_gpu, shares = device.type == "cuda", shares_passes_on(device)
    small = 0 if invariant == "none" or options.is_strict else options.strict_rows
    joins = shares and options.compute == "fast" and (invariant == "none" or small > 0)
    passes = _passes(plan, options) if joins else ()
    return Capabilities(
        max_num_seqs=options.max_batch,
        max_context=options.max_context,
        page_size=PAGE,
        num_pages=num_pages,
        num_snapshots=num_snapshots(plan, options, free_bytes(options, device) - reserved),
        has_sequence_state=bool(plan.sequence_states),
        cell=_CELL_OF_MIXERS if mixes else _CELL,
        max_prompts=most_pieces(plan, options) if joins else 1,
        max_step_tokens=most_prompt_tokens(options),
        runs_ahead=is_gpu,
        marks=marks_each(plan),
        passes=passes,
        most_shared=passes[-1][1][-1] if passes and mixes else sys.maxsize,
        far=far_of(plan),
        invariant=invariant,
        hidden_size=plan.hidden_size,
        invariant_rows=small,
        max_drafts=min(options.max_drafts, small - 1) if small else options.max_drafts,
    )


def decode_rows(options: CompileOptions) -> tuple[int, ...]:
    """Return the rows of captured decode steps, drafts included."""
    return decode_buckets(options.max_batch * (1 + options.max_drafts))


def num_draft_states(plan: KernelProgram, options: CompileOptions) -> int:
    """Return the number of per-sequence states for drafts in flight."""
    if not plan.sequence_states:
        return 0
    return min(options.max_batch * options.max_drafts, max(options.max_drafts, _DRAFT_STATES))


def marks_each(plan: KernelProgram) -> int:
    """Positions inside of a piece of a prompt at which its state can be kept as it passes."""
    return MOST_MARKS if plan.sequence_states else 0


def shares_passes_on(device: torch.device) -> bool:
    """Return whether mixed batches are faster on a device. The CPU runs them in tests only."""
    return device.type == "cuda"


def _passes(plan: KernelProgram, options: CompileOptions) -> Passes:
    """Those that are captured where pieces and rows share any; of more than the usual tokens where
    several prompts can fill them.
    """
    rows, several = decode_buckets(options.max_batch), 0
    if options.max_batch > 1 and not options.is_strict:
        at_once = options.max_batch * pages_of(options.max_context) * PAGE
        several = min(_MOST_SHARED, options.max_shared_tokens, at_once)
    most = min(most_prompt_tokens(options), max(USUAL_OF_MIXERS, several))
    return passes_for(rows, most, has_mixers=has_mixers(plan))


def most_shared(plan: KernelProgram, options: CompileOptions) -> int:
    """Tokens of the largest pass that mixers share; 0 where there are none."""
    shares = has_mixers(plan) and options.compute == "fast"
    return _passes(plan, options)[-1][1][-1] if shares else 0


def most_pieces(plan: KernelProgram, options: CompileOptions) -> int:
    """Pieces of prompts that share a pass where any do."""
    if options.compute != "fast":
        return 1
    is_usual = has_mixers(plan) and most_shared(plan, options) <= USUAL_OF_MIXERS
    return _JOINED_OF_MIXERS if is_usual else _JOINED


def num_marks(plan: KernelProgram, options: CompileOptions) -> int:
    """Marks of all pieces of a pass: places for state that is no sequence's."""
    return marks_each(plan) * most_pieces(plan, options)


def free_bytes(options: CompileOptions, device: torch.device) -> int:
    """Bytes that this process may still take: what is free, and no more than its fraction of the
    whole, whatever other processes hold; of a CPU, which stands for a GPU in tests, any number.
    """
    if device.type != "cuda":
        return 1 << 62
    free, total = torch.cuda.mem_get_info(device)
    if options.memory_fraction is None:
        return free
    return min(free, int(options.memory_fraction * total) - torch.cuda.memory_reserved(device))


def shared_pages(plan: KernelProgram, options: CompileOptions, free: int, copies: int = 0) -> int:
    """Pages for which there is room beside weights, ``copies`` bytes of some of them, work and what
    each sequence keeps besides.

    Raises:
        CompileError: where they would not hold one whole context.
    """
    check_fits(plan, replace(options, max_batch=1), free, copies)
    room = free - weight_bytes(plan) - copies - work_bytes(plan, options)
    left, a_page = _left_to_pages(plan, options, room), _page_bytes(plan, options)
    found = left // a_page if a_page else options.max_batch * pages_of(options.max_context)
    if found < pages_of(options.max_context):
        raise CompileError(
            f"target cuda: {options.max_batch} sequences leave room for {max(found, 0) * PAGE} "
            f"positions; allowed: fewer sequences, or a context below {options.max_context}"
        )
    return found


def _left_to_pages(plan: KernelProgram, options: CompileOptions, room: int) -> int:
    """Of so many bytes, what is left when each sequence has its own state, and snapshots theirs: an
    eighth, or half of what every context leaves, where further pages find no prefix without.
    """
    each = sequence_bytes(plan.sequence_states)
    left = room - options.max_batch * each
    share = max(0, left // _SHARE_OF_SNAPSHOTS, (room - state_bytes(plan, options)) // 2)
    return left - min(_MAX_SNAPSHOTS * each, share)


def _page_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Bytes of a page of all states together."""
    return sum(page_bytes(each, _kind(each.format, options)) for each in plan.states)


def check_fits(plan: KernelProgram, options: CompileOptions, free: int, copies: int = 0) -> None:
    """:func:`check_room` for a number of free bytes, and of bytes of weights held once more."""
    sizes = {
        "of weights": weight_bytes(plan),
        "of weights held once more": copies,
        "of cache": state_bytes(plan, options),
        "to work": work_bytes(plan, options),
    }
    need = sum(sizes.values())
    if need <= free:
        return
    parts = ", ".join(f"{size / _GB:.1f} {what}" for what, size in sizes.items() if size)
    raise CompileError(
        f"target cuda: {need / _GB:.1f} GB are needed ({parts}) for a batch of "
        f"{options.max_batch} with {options.max_context} positions each, and {free / _GB:.1f} GB "
        f"of the GPU's memory are free; allowed: {_what_fits(plan, options, free - copies)}"
        + (", or no copies" if copies else "")
    )


def _what_fits(plan: KernelProgram, options: CompileOptions, free: int) -> str:
    """Whole pages of the same sequences, or fewer sequences of the same length."""
    left = free - weight_bytes(plan) - work_bytes(plan, options)
    left -= options.max_batch * sequence_bytes(plan.sequence_states)
    a_page = _page_bytes(plan, options)
    num_pages = left // a_page if left > 0 and a_page else 0
    fits = []
    if num_pages >= options.max_batch:
        most = num_pages // options.max_batch * PAGE
        fits.append(f"a context of up to {most} positions at this batch")
    if num_pages >= pages_of(options.max_context):
        most = num_pages // pages_of(options.max_context)
        fits.append(f"a batch of up to {most} at this context")
    if not fits and num_pages:
        fits.append(f"a batch of 1 with up to {num_pages * PAGE} positions")
    return ", or ".join(fits) or "a smaller model, or formats of fewer bits"


def weight_bytes(plan: KernelProgram) -> int:
    """Bytes of weights on the device."""
    total = 0
    for wanted in wanted_by(plan):
        recipe = wanted.recipe
        if wanted.kind == "fp32":
            total += 4 * torch.Size(recipe.shape).numel()
        else:
            total += tiles(wanted.kind, held_sizes(recipe, paired=wanted.is_paired)).num_bytes
    return total


def state_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Bytes of the page pool, every sequence at full length, and of what else each keeps."""
    num_pages = options.max_batch * pages_of(options.max_context)
    return num_pages * _page_bytes(plan, options) + options.max_batch * sequence_bytes(
        plan.sequence_states
    )


def num_snapshots(plan: KernelProgram, options: CompileOptions, free: int) -> int:
    """Snapshots of a sequence's own state that there is room for in so many free bytes, beside
    what steps need: at most ``_MAX_SNAPSHOTS``, none where sequences have no such state.
    """
    each = sequence_bytes(plan.sequence_states)
    room = free - work_bytes(plan, options)
    return min(_MAX_SNAPSHOTS, max(0, room // each)) if each else 0


def most_prompt_tokens(options: CompileOptions) -> int:
    """Tokens of prompts that a step is given at most: a longer one comes in pieces."""
    return max(options.max_step_tokens, _LEAST_PROMPT)


def work_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Bytes of a prompt's intermediate values, a dequantised weight, and what libraries take; those
    of the largest prompt or pass that is captured once more, for graphs have memory of their own.
    """
    tokens = min(options.max_context, most_prompt_tokens(options))
    sizes = prompt_buckets(plan, options.parallel.tensor)
    passes = _passes(plan, options) if options.compute == "fast" else ()
    longest = next((each for each in sizes if each >= tokens), sizes[-1])
    captured = max([longest, *(width + most[-1] for width, most in passes)])
    prompt = sum(_pass_bytes(plan, options, each) for each in (max(tokens, captured), captured))
    num_states = num_marks(plan, options) + num_draft_states(plan, options)
    states = num_states * sequence_bytes(plan.sequence_states)
    return _WORKSPACE + prompt + states + _decode_bytes(plan, options)


def _pass_bytes(plan: KernelProgram, options: CompileOptions, tokens: int) -> int:
    """Bytes that a pass of so many tokens of prompts takes while it runs."""
    exact = options.compute == "exact"
    size = 4 if exact else 2
    buffers = sum((size if each.role == OPERAND else 4) * each.width for each in plan.buffers[:-1])
    shapes = [each.weight.shape for each in plan.products]
    whole = shapes if exact else shapes[:-1]
    dense = max((size * rows * columns for rows, columns in whole), default=0)
    widest = max((rows for rows, _ in shapes[:-1]), default=0)
    return tokens * (buffers + size * widest) + dense + mixer_bytes(plan, tokens)


def _decode_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Bytes of a decode step's own values beyond those of the few rows that the workspace holds:
    logits above all, with what choosing from them takes.
    """
    rows = decode_rows(options)[-1]
    width = plan.vocab_size + sum(each.width for each in plan.buffers)
    return 4 * max(0, rows - _FEW_ROWS) * width


def _kind(format_name: str, options: CompileOptions) -> str:
    return cache_kind(format_name, exact=options.compute == "exact")
