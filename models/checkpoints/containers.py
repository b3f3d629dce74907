"""Opens a checkpoint in any container."""

from __future__ import annotations

from pathlib import Path

from tilewright.models.checkpoints.base import Checkpoint
from tilewright.models.checkpoints.calibrated.manifest import is_calibrated


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.gguf`` or ``.m`` file or a Hugging Face folder from `find_model`.

    Raises:
        CheckpointError: Files are missing, truncated, corrupt or not supported.
    """
    if is_calibrated(path):
        from tilewright.models.checkpoints.calibrated.checkpoint import CalibratedCheckpoint

        return CalibratedCheckpoint(path)
    if path.is_dir():
        from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path)
    if path.suffix.lower() == ".m":
        from tilewright.models.checkpoints.dllama.checkpoint import DllamaCheckpoint

        return DllamaCheckpoint(path)
    from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)
