"""An ONNX Runtime program on disk: an ONNX model, its weight file, and the session for both.

The model file has all data for a session. It is independent of batches, slots and steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnxruntime as ort
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.targets.cpu.onnxruntime.emit import emit_model
from tilewright.compiler.targets.cpu.onnxruntime.emitter import (
    HIDDEN,
    KEY_SUFFIX,
    STATE_SUFFIX,
    VALUE_SUFFIX,
    CacheSpec,
    Emitter,
    SequenceState,
)
from tilewright.compiler.targets.cpu.onnxruntime.weights import WeightFile
from tilewright.compiler.targets.interface.base import CompileOptions, Progress
from tilewright.compiler.targets.interface.threads import single_torch_thread
from tilewright.compiler.targets.pipeline import vocab_size
from tilewright.errors import CheckpointError, CompileError, NoRoomError, one_line

MODEL, WEIGHTS = "model.onnx", "weights.bin"
_SPIN_US = 2000
"""Spin time of idle threads in microseconds. It exceeds the host's time between two steps, and is
far below ONNX Runtime's default, which slows other work on the cores.
"""
_WEIGHT_BYTES, _MAX_CONTEXT = "tilewright.weight_bytes", "tilewright.max_context"


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A session over a program, with metadata from its file."""

    session: ort.InferenceSession
    caches: tuple[CacheSpec, ...]
    states: tuple[SequenceState, ...]
    vocab_size: int
    hidden_size: int
    weight_bytes: int


def write_model(
    graph_module: GraphModule,
    get_weight: Callable[[str], Tensor],
    folder: Path,
    options: CompileOptions,
    progress: Progress,
) -> None:
    """Stream the weights into ``folder`` and write the model.

    Raises:
        CompileError: ONNX Runtime has no operators for the graph, or the disk is full.
    """
    weights = WeightFile(folder / WEIGHTS, get_weight)
    emitter = Emitter(
        weights,
        exact=options.compute == "exact",
        max_context=options.max_context,
        vocab_size=vocab_size(graph_module),
    )
    try:
        with single_torch_thread():
            proto = emit_model(
                graph_module, emitter, lambda done, total: progress("weights", done, total)
            )
    finally:
        weights.close()
    facts = {_WEIGHT_BYTES: weights.num_bytes, _MAX_CONTEXT: options.max_context}
    for key, value in facts.items():
        proto.metadata_props.add(key=key, value=str(value))
    try:
        (folder / MODEL).write_bytes(proto.SerializeToString())
    except OSError as error:
        raise NoRoomError(
            f"{folder}: the model cannot be written ({error.strerror}); allowed: a folder with room"
        ) from None


def open_model(folder: Path, options: CompileOptions) -> OpenModel:
    """Return a session over the program in ``folder``.

    Raises:
        CheckpointError: The files are not a program.
        CompileError: The context exceeds the program's limit.
    """
    path = folder / MODEL
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.num_threads or describe_cpu().num_cores
    settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_US))
    try:
        session = ort.InferenceSession(str(path), settings, providers=["CPUExecutionProvider"])
        facts = session.get_modelmeta().custom_metadata_map
        shape_of = {each.name: each.shape for each in session.get_inputs()}
        caches = tuple(
            CacheSpec(name.removesuffix(KEY_SUFFIX), shape[1], shape[3])
            for name, shape in shape_of.items()
            if name.endswith(KEY_SUFFIX)
        )
        states = tuple(
            SequenceState(name.removesuffix(STATE_SUFFIX), tuple(map(int, shape[1:])))
            for name, shape in shape_of.items()
            if name.endswith(STATE_SUFFIX)
        )
        shape_out = {each.name: each.shape for each in session.get_outputs()}
        num_logits, hidden = shape_out["logits"][-1], shape_out.get(HIDDEN, [0])[-1]
        weight_bytes, max_context = int(facts[_WEIGHT_BYTES]), int(facts[_MAX_CONTEXT])
        assert all(f"{cache.name}{VALUE_SUFFIX}" in shape_of for cache in caches)
        assert all(f"{state.name}{STATE_SUFFIX}.out" in shape_out for state in states)
    except Exception as error:  # the library has a separate exception for each form of damage
        raise CheckpointError(
            f"{path}: not a program of the cpu target: {one_line(error)}"
        ) from None
    if options.max_context > max_context:
        raise CompileError(
            f"context of {options.max_context} positions; {path} was built for up to {max_context}"
        )
    return OpenModel(session, caches, states, num_logits, hidden, weight_bytes)
