"""The GPU, the memory that a model needs, and sizes that fit."""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, replace

import torch

from tilewright.compiler.targets.cuda.graphs.capture import decode_buckets, prompt_buckets
from tilewright.compiler.targets.cuda.graphs.mixed_graphs import USUAL_OF_MIXERS, Passes, passes_for
from tilewright.compiler.targets.cuda.invariance import invariant_of
from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import scratch_bytes
from tilewright.compiler.targets.cuda.kernels.attention.prefill_triton import MAX_CHUNKS
from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import CHUNK
from tilewright.compiler.targets.cuda.lowering import far_of, has_mixers
from tilewright.compiler.targets.cuda.numerics import cache_kind, tiles
from tilewright.compiler.targets.cuda.state.final_states import final_state_bytes
from tilewright.compiler.targets.cuda.state.pages import PAGE, page_bytes, pages_of
from tilewright.compiler.targets.cuda.state.snapshot_positions import MOST_MARKS
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.state.token_batch import MAX_ROWS
from tilewright.compiler.targets.cuda.steps.mixers import draft_input_bytes, mixer_bytes
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds, copy_bytes, kinds_for
from tilewright.compiler.targets.cuda.weights.e4m3 import LEAST_LOFI
from tilewright.compiler.targets.cuda.weights.experts import packed_sizes
from tilewright.compiler.targets.cuda.weights.stream import draft_wanted_by, wanted_by
from tilewright.compiler.targets.interface.base import Capabilities, CompileOptions
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    CrossAttentionOp,
    DeltaRuleOp,
    KernelProgram,
)
from tilewright.distributed.world import place_of
from tilewright.errors import CompileError

_WORKSPACE = 2 << 30
"""Bytes reserved for libraries, captured graphs and the CUDA context."""
_MAX_SMALL_M = 64
_CELL, _CELL_OF_MIXERS = 256, 1024
"""Smallest useful prefill chunk in tokens. Plans with experts need larger chunks."""
_JOINED, _JOINED_OF_MIXERS = MAX_CHUNKS, 4
"""Maximum number of prefill chunks in a mixed batch. Chunks have separate snapshot positions."""
_LEAST_PROMPT = 1024
"""Minimum prefill capacity of a step in tokens, at least the smallest useful chunk of any model."""
_MAX_SNAPSHOTS = 512
_SHARE_OF_SNAPSHOTS = 8
"""Minimum share of snapshots in the memory that pages would have without them, as a divisor."""
_MIN_PAGES_SHARE, _MIN_PAGES_SHARE_FP8 = 3 / 4, 1 / 3
"""Minimum share of the pages' memory after an optional allocation, and after e4m3 copies. Large
batches gain more by these copies than they lose by fewer pages.
"""
_MOST_SHARED = 8192
"""Maximum number of prefill tokens of a mixed batch with mixers."""
_GB = 1e9


def open_device(options: CompileOptions | None = None) -> torch.device:
    """Return the selected GPU and make it current.

    This is the current GPU, a named GPU or the GPU of the rank. With Triton's interpreter, return
    the CPU.

    Raises:
        CompileError: There is no usable GPU, or a rank has no GPU.
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
    """Return a rank's named device, or the device at its index on the machine."""
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
    """Memory capacity: the pool's pages, and dequantized weight copies.

    Attributes:
        notes: Pages that copies replace, if the pool does not fit all contexts.
    """

    num_pages: int
    copies: Kinds
    notes: tuple[str, ...] = ()


def check_room(plan: KernelProgram, options: CompileOptions, device: torch.device) -> MemoryBudget:
    """Check free GPU memory before loading, and return the capacity.

    Raises:
        CompileError: Names the required bytes and the largest context or batch that would fit.
    """
    free = free_bytes(options, device)
    copies = copies_in(plan, options, free)
    size = copy_bytes(plan, copies)
    if options.memory_fraction is not None and device.type == "cuda":
        sizes = plan, options, free, size
        return MemoryBudget(shared_pages(*sizes), copies, page_notes(*sizes))
    check_fits(plan, options, free, size)
    return MemoryBudget(options.max_batch * pages_of(options.max_context), copies)


def page_notes(
    program: KernelProgram, options: CompileOptions, free: int, copies: int
) -> tuple[str, ...]:
    """Return a note on the pages that ``copies`` bytes replace, if not all contexts fit."""
    num_pages = shared_pages(program, options, free, copies)
    if not copies or num_pages >= options.max_batch * pages_of(options.max_context):
        return ()
    without_copies = shared_pages(program, options, free)
    return (
        f"dequantized copies take {copies / _GB:.1f} GB of the cache: {num_pages:,} pages in "
        f"place of {without_copies:,}; --weight-copies none has no copies",
    )


def copies_in(plan: KernelProgram, options: CompileOptions, free: int) -> Kinds:
    """Return the dequantized weight copies for ``free`` bytes.

    ``options.copies`` selects them. With ``auto``, all copies are made if they fit, else those of
    blocks, else e4m3 copies, which gain most for their size, else none. E4m3 copies also fit if the
    pages keep a third of their memory and `LEAST_LOFI` full contexts: smaller decode steps do not
    use them.
    """
    kinds = kinds_for(options)
    if options.copies != "auto":
        return kinds
    room = free - weight_bytes(plan) - work_bytes(plan, options)
    codes = Kinds(codes=kinds.codes)
    usual = (kinds, replace(kinds, rounded=False), codes)
    tries = [(each, _MIN_PAGES_SHARE, 1) for each in usual]
    for candidate, share, contexts in (*tries, (codes, _MIN_PAGES_SHARE_FP8, LEAST_LOFI)):
        size = copy_bytes(plan, candidate)
        if size and _has_room_for(size, plan, options, room, share=share, contexts=contexts):
            return candidate
    return NO_COPIES


def _has_room_for(
    size: int,
    plan: KernelProgram,
    options: CompileOptions,
    room: int,
    *,
    share: float = _MIN_PAGES_SHARE,
    contexts: int = 1,
) -> bool:
    """Return whether an optional allocation fits.

    It fits if all contexts at full length still fit. With shared pages, it also fits if the pages
    keep this ``share`` of their memory and this number of full contexts.
    """
    if size + state_bytes(plan, options) <= room:
        return True
    if options.memory_fraction is None:
        return False
    before, left = (_left_to_pages(plan, options, each) for each in (room, room - size))
    one = pages_of(options.max_context) * _page_bytes(plan, options)
    return left >= max(contexts * one, share * before)


def with_passes_that_fit(
    plan: KernelProgram, options: CompileOptions, device: torch.device
) -> CompileOptions:
    """Return the options with the largest mixed-batch size that fits memory.

    A smaller size is used if necessary. Requested weight copies take precedence. Ranks, whose free
    memory may differ, agree on the minimum.
    """
    if most_shared(plan, options) <= USUAL_OF_MIXERS:
        return options
    usual = replace(options, max_shared_tokens=USUAL_OF_MIXERS)
    least = work_bytes(plan, usual)
    left = free_bytes(options, device) - weight_bytes(plan) - least
    if options.copies != "auto":
        left -= copy_bytes(plan, kinds_for(options))
    for size in reversed(_passes(plan, options)[-1][1]):
        found = replace(options, max_shared_tokens=size)
        if _has_room_for(work_bytes(plan, found) - least, plan, options, left):
            return found
    return usual


def capabilities_of(
    plan: KernelProgram,
    options: CompileOptions,
    device: torch.device,
    num_pages: int,
    *,
    has_cpp: bool,
    reserved: int = 0,
) -> Capabilities:
    """Return what steps may be; ``reserved`` bytes of the free memory are taken.

    ``has_cpp``: CUDA C++ kernels run.
    """
    invariant, mixes = invariant_of(plan, options, has_cpp), has_mixers(plan)
    is_gpu, shares = device.type == "cuda", shares_passes_on(device)
    small = 0 if invariant == "none" or options.is_strict else options.strict_rows
    joins = shares and options.compute == "fast" and (invariant == "none" or small > 0)
    has_mixed = joins and (mixes or options.max_batch > 1)
    passes = _passes(plan, options) if has_mixed else ()
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
        alignment=CHUNK if plan.sequence_states else 1,
        most_shared=passes[-1][1][-1] if passes and mixes else sys.maxsize,
        far=far_of(plan),
        invariant=invariant,
        hidden_size=plan.hidden_size,
        invariant_rows=small,
        max_drafts=min(max_drafts(plan, options), small - 1 if small else MAX_DRAFTS),
        max_proposals=0 if plan.draft_layer is None else MAX_DRAFTS,
    )


def decode_rows(options: CompileOptions) -> tuple[int, ...]:
    """Return the rows of captured decode steps, drafts included."""
    return decode_buckets(options.max_batch * (1 + options.max_drafts))


def max_drafts(program: KernelProgram, options: CompileOptions) -> int:
    """Return the maximum drafts per slot. A delta rule needs its convolution in the kernel.

    With cross-attention layers, drafts are not supported.
    """
    if any(isinstance(op, CrossAttentionOp) for op in program.instructions):
        return 0
    if not program.sequence_states:
        return options.max_drafts
    rules = [op for op in program.instructions if isinstance(op, DeltaRuleOp)]
    is_whole = all(rule.convolve is not None for rule in rules)
    return min(options.max_drafts, MAX_ROWS - 1) if is_whole else 0


def _draft_bytes(program: KernelProgram, options: CompileOptions) -> int:
    """Return the kept draft input bytes."""
    return options.max_batch * max_drafts(program, options) * draft_input_bytes(program)


def marks_each(plan: KernelProgram) -> int:
    """Return the maximum number of snapshot positions inside a chunk."""
    return MOST_MARKS if plan.sequence_states else 0


def shares_passes_on(device: torch.device) -> bool:
    """Return whether mixed batches are faster on a device. The CPU runs them in tests only."""
    return device.type == "cuda"


def _passes(plan: KernelProgram, options: CompileOptions) -> Passes:
    """Return the mixed batch sizes to capture.

    Sizes above the usual maximum are included if several prompts can fill them.
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
    """Return the maximum prefill chunk count in a mixed batch."""
    if options.compute != "fast":
        return 1
    is_usual = has_mixers(plan) and most_shared(plan, options) <= USUAL_OF_MIXERS
    return _JOINED_OF_MIXERS if is_usual else _JOINED


def num_marks(plan: KernelProgram, options: CompileOptions) -> int:
    """Return the snapshot buffer count for all chunks in a mixed batch."""
    return marks_each(plan) * most_pieces(plan, options)


def free_bytes(options: CompileOptions, device: torch.device) -> int:
    """Return how much memory this process may still allocate, in bytes.

    The limit is the free memory and, if set, the process's fraction of the total. The CPU, used for
    tests, has no limit.
    """
    if device.type != "cuda":
        return 1 << 62
    free, total = torch.cuda.mem_get_info(device)
    if options.memory_fraction is None:
        return free
    return min(free, int(options.memory_fraction * total) - torch.cuda.memory_reserved(device))


def shared_pages(plan: KernelProgram, options: CompileOptions, free: int, copies: int = 0) -> int:
    """Return the number of pages that fit.

    Args:
        copies: Dequantized weight copy bytes.

    Raises:
        CompileError: The pages cannot store one full context.
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
    """Return the bytes for pages after per-sequence state and snapshots.

    Snapshots get at least an eighth. If all contexts fit, they get half of the excess, because more
    pages would find no prefix without snapshots.
    """
    each = sequence_bytes(plan.sequence_states)
    left = room - options.max_batch * each
    share = max(0, left // _SHARE_OF_SNAPSHOTS, (room - state_bytes(plan, options)) // 2)
    return left - min(_MAX_SNAPSHOTS * each, share)


def _page_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Return the bytes of a page over all layers."""
    return sum(page_bytes(each, _kind(each.format, options)) for each in plan.states)


def check_fits(plan: KernelProgram, options: CompileOptions, free: int, copies: int = 0) -> None:
    """Check that a program fits ``free`` bytes; see :func:`check_room`.

    Args:
        copies: Dequantized weight copy bytes.
    """
    sizes = {
        "of weights": weight_bytes(plan),
        "of dequantized weight copies": copies,
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
    """Return the largest context at this batch size, and the largest batch at this context, that
    fit.
    """
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
    """Weight bytes on the device."""
    total = 0
    for wanted in (*wanted_by(plan), *draft_wanted_by(plan)):
        recipe = wanted.recipe
        if wanted.kind == "fp32":
            total += 4 * torch.Size(recipe.shape).numel()
        else:
            total += tiles(wanted.kind, packed_sizes(recipe, paired=wanted.is_paired)).num_bytes
    return total


def state_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Return the bytes of all pages and per-sequence state at full length."""
    num_pages = options.max_batch * pages_of(options.max_context)
    return num_pages * _page_bytes(plan, options) + options.max_batch * sequence_bytes(
        plan.sequence_states
    )


def num_snapshots(plan: KernelProgram, options: CompileOptions, free: int) -> int:
    """Return the number of snapshots that fit ``free`` bytes, with the working memory of steps.

    At most ``_MAX_SNAPSHOTS``. 0: sequences have no state of fixed size.
    """
    each = sequence_bytes(plan.sequence_states)
    room = free - work_bytes(plan, options)
    return min(_MAX_SNAPSHOTS, max(0, room // each)) if each else 0


def most_prompt_tokens(options: CompileOptions) -> int:
    """Return the maximum prefill tokens in a step. Longer prompts run in chunks."""
    return max(options.max_step_tokens, _LEAST_PROMPT)


def work_bytes(plan: KernelProgram, options: CompileOptions) -> int:
    """Return the bytes for intermediate values, a dequantized weight, a tower and libraries.

    The largest captured prompt or mixed batch counts twice because graphs have separate memory.
    """
    longest, captured = prompt_sizes(plan, options)
    prompt = sum(_pass_bytes(plan, options, each) for each in (longest, captured))
    states = num_marks(plan, options) * sequence_bytes(plan.sequence_states)
    states += _draft_bytes(plan, options) + _draft_layer_bytes(plan, options)
    return _WORKSPACE + options.tower_bytes + prompt + states + _decode_bytes(plan, options)


def prompt_sizes(program: KernelProgram, options: CompileOptions) -> tuple[int, int]:
    """Return the maximum tokens in a prefill, and in a captured prefill."""
    tokens = min(options.max_context, most_prompt_tokens(options))
    sizes = prompt_buckets(program, options.parallel.tensor)
    passes = _passes(program, options) if options.compute == "fast" else ()
    longest = next((size for size in sizes if size >= tokens), sizes[-1])
    captured = max([longest, *(width + totals[-1] for width, totals in passes)])
    return max(tokens, captured), captured


def _draft_layer_bytes(program: KernelProgram, options: CompileOptions) -> int:
    """Return a draft layer's working memory in bytes, without weights and pages.

    Its prefill reuses the model's working memory.
    """
    layer = program.draft_layer
    if layer is None:
        return 0
    num_tokens, size = sum(prompt_sizes(program, options)), 4 if options.compute == "exact" else 2
    kept = final_state_bytes(options.max_batch, num_tokens, program.hidden_size, size)
    width = layer.vocab_size + sum(buffer.width for buffer in layer.buffers)
    return kept + decode_rows(options)[-1] * (4 * width + 2 * size * program.hidden_size)


def _pass_bytes(plan: KernelProgram, options: CompileOptions, tokens: int) -> int:
    """Return the working memory in bytes of a forward with ``tokens`` prefill tokens."""
    exact = options.compute == "exact"
    size = 4 if exact else 2
    buffers = sum((size if each.role == OPERAND else 4) * each.width for each in plan.buffers[:-1])
    shapes = [each.weight.shape for each in plan.products]
    whole = shapes if exact else shapes[:-1]
    dense = max((size * rows * columns for rows, columns in whole), default=0)
    widest = max((rows for rows, _ in shapes[:-1]), default=0)
    return tokens * (buffers + size * widest) + dense + mixer_bytes(plan, tokens)


def _decode_bytes(program: KernelProgram, options: CompileOptions) -> int:
    """Return the bytes of a decode step's values in excess of ``_WORKSPACE``.

    Logits and their selection dominate. Cross-attention has splits of tiles.
    """
    rows = decode_rows(options)[-1]
    width = program.vocab_size + sum(buffer.width for buffer in program.buffers)
    cross = (op for op in program.instructions if isinstance(op, CrossAttentionOp))
    splits = [
        scratch_bytes(rows, op.num_heads, op.norm.shape[-1])
        for op in itertools.islice(cross, 1)  # layers have equal sizes
    ]
    return 4 * max(0, rows - _MAX_SMALL_M) * width + sum(splits)


def _kind(format_name: str, options: CompileOptions) -> str:
    return cache_kind(format_name, exact=options.compute == "exact")
