"""Names of the safetensors files in a folder. Opens no weights."""

from __future__ import annotations

from pathlib import Path

from tilewright.errors import CheckpointError, allowed
from tilewright.models.checkpoints.json_file import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def find_shards(path: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of shard files, and the index with a shard per tensor (empty without).

    Raises:
        CheckpointError: There are no weights, several files without an index, or an invalid index.
    """
    if (path / SINGLE).is_file():
        return [SINGLE], {}
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(
                f"{path / INDEX}: weight_map is missing or empty; allowed: files by tensor"
            )
        for name, shard in weight_map.items():
            is_text = isinstance(shard, str) and shard.isprintable()
            if not is_text or Path(shard).name != shard:
                raise CheckpointError(
                    f"{path / INDEX}: weight_map[{name!r}] = {shard!r}; "
                    "allowed: the name of a file in the same folder"
                )
        return sorted(set(weight_map.values())), weight_map
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{path}: has {len(found)} .safetensors files and neither {SINGLE} nor {INDEX}; "
            f"{allowed((SINGLE, INDEX, 'exactly one .safetensors file'))}"
        )
    return found, {}
