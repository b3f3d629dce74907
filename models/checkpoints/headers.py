"""What can be known to be wrong with a checkpoint before torch is imported, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from tilewright.models.architectures.table import check_model_type, find_gguf_type
from tilewright.models.checkpoints import dllama_header, gguf_header
from tilewright.models.checkpoints.json_file import read_json
from tilewright.models.checkpoints.mapped_file import map_file


def check_header(path: Path) -> None:
    """Read what stands before the weights at ``path``, and refuse what opening it would refuse.

    Of a ``.gguf`` file these are its metadata, its table of tensors and its architecture; of a
    ``.m`` file its header; of a folder, that config.json is one and names an architecture that is
    read. What only the architecture's own file can judge is left to `open_checkpoint`.

    Raises:
        CheckpointError: as `open_checkpoint` would.
    """
    if path.is_dir():
        where = path / "config.json"
        check_model_type(read_json(where).get("model_type"), f"{where}: model_type")
        return
    data = memoryview(map_file(path))
    if path.suffix.lower() == ".m":
        dllama_header.read_header(data, path)
        return
    name = gguf_header.read_header(data, path).metadata.get("general.architecture")
    find_gguf_type(name, f"{path}: general.architecture")
