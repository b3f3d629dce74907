"""Drive an emitted file on a mock cluster: every operator validates its shapes, formats, places.

    python check_file.py FILE BOARD SCRATCH

Prints one JSON object: the operators in order, each with what it was given, and the error of the
one that refused, if any. No values are computed. Runs in the Python that has ttnn.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import mock_cluster

TRANSFERS = {"from_torch", "to_torch", "to_device", "empty", "zeros"}
SPACES = {"experimental", "transformer"}


class RefusedError(Exception):
    """An operator did not validate; the record has its error."""


class Recorder:
    """Stands for the module ttnn (or a space of it) and keeps a record of each operator called."""

    def __init__(self, module, record: list, phase: list, space: str = "") -> None:
        self._module, self._record, self._phase, self._space = module, record, phase, space

    def __getattr__(self, name: str):
        found = getattr(self._module, name)
        if name in SPACES:
            return Recorder(found, self._record, self._phase, f"{name}.")
        if type(found).__name__ != "FastOperation" or name in TRANSFERS:
            return found

        def call(*args, **named):
            entry = {
                "phase": self._phase[0],
                "operator": self._space + name,
                "given": [_text(each) for each in args if _is_tensor(each)],
                "error": "",
            }
            self._record.append(entry)
            try:
                result = found(*args, **named)
            except (RuntimeError, TypeError) as error:
                entry["error"] = _short(error)
                raise RefusedError from None
            made = result if isinstance(result, (list, tuple)) else [result]
            entry["made"] = [_text(each) for each in made if _is_tensor(each)]
            return result

        return call


def _short(error: Exception) -> str:
    return " ".join(str(error).split("backtrace:")[0].split())[:400]


def _is_tensor(value) -> bool:
    return type(value).__name__ == "Tensor"


def _text(tensor) -> str:
    memory = tensor.memory_config()
    layout = str(memory.memory_layout).rsplit(".", 1)[-1].lower()
    buffer = str(memory.buffer_type).rsplit(".", 1)[-1].lower()
    dtype = str(tensor.dtype).rsplit(".", 1)[-1].lower()
    return f"{dtype}{list(tensor.shape)} {buffer} {layout}"


def drive(path: Path) -> dict:
    """Prefill of two chunks where the cache has room for them, then a decode step."""
    spec = importlib.util.spec_from_file_location("emitted", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["emitted"] = module
    spec.loader.exec_module(module)
    record: list = []
    phase = ["load"]
    real, module.ttnn = module.ttnn, Recorder(module.ttnn, record, phase)
    mesh = module.open_mesh()
    try:
        try:
            model = module.Model(mesh, module.blank_weights(mesh))
        except RuntimeError as error:
            record.append({"phase": "load", "operator": "empty", "error": _short(error)})
            raise RefusedError from None
        phase[0] = "prefill"
        rest = 5 if module.CAPACITY >= 2 * module.LENGTH else 0
        model.prefill(module.BATCH - 1, [1] * (module.LENGTH + rest))
        phase[0] = "decode"
        given = model.inputs([1] * module.BATCH, [module.LENGTH] * module.BATCH)
        logits = model.decode({n: real.to_device(t, mesh) for n, t in given.items()})
        assert model.fetch(logits).shape == (32, module.VOCAB)
    except RefusedError:
        pass
    view = real.get_memory_view(mesh, real.BufferType.DRAM)
    used = view.total_bytes_allocated_per_bank * view.num_banks
    return {"operators": record, "dram_bytes": used}


if __name__ == "__main__":
    _, file, board, scratch = sys.argv
    mock_cluster.use(board, Path(scratch))
    print(json.dumps(drive(Path(file))))
