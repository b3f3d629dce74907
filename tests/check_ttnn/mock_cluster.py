"""Mock boards for ttnn, in UMD's format for mock clusters.

Runs in a Python with ttnn and needs no Tilewright. A mock chip has a harvested core row, like
retail boards. This leaves an 8 x 8 worker grid.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

HARVESTED_ROW = 32  # mask of a tensix row

# Blackhole boards with one chip: the kind in a board number, then masks of harvested columns, DRAM
# banks, Ethernet cores and PCIe cores.
BLACKHOLE = {"p100": (0x43, 3, 1, 288, 2), "p150": (0x41, 3, 0, 288, 2)}
_MASKS = ("harvest_mask", "dram_harvesting_mask", "eth_harvesting_mask", "pcie_harvesting_mask")

# Positions of T3K chips: (column, row) on the sheet. Chips 0 to 3 are on the host's PCIe. Board i
# also has chip i + 4.
T3K_SLOTS = [(1, 0), (1, 1), (2, 1), (2, 0), (0, 0), (0, 1), (3, 1), (3, 0)]

# Cables between boards: (chip, chip, first channel of two on both sides).
T3K_CABLES = [
    (0, 1, 14, 14),
    (2, 3, 14, 14),
    (0, 3, 0, 0),
    (1, 2, 0, 0),
    (4, 5, 6, 6),
    (6, 7, 6, 6),
]


def cluster_text(board: str) -> str:
    """Return the description of a board as YAML in flow style, which UMD reads.

    Boards: ``n150``, ``n300``, ``t3k``, ``p100`` and ``p150``.
    """
    import json

    if board in BLACKHOLE:
        return _yaml(_blackhole(board))
    slots, boards = {
        "n150": ([(0, 0)], [[0]]),
        "n300": ([(0, 0), (1, 0)], [[0, 1]]),
        "t3k": (T3K_SLOTS, [[i, i + 4] for i in range(4)]),
    }[board]
    pairs = [(a, b, 8, 0) for a, b in (each for each in boards if len(each) == 2)]
    if board == "t3k":
        pairs += T3K_CABLES
    kind = "n150" if board == "n150" else "n300"
    first_id = 0x1_0001_8500_0000_00 if board == "n150" else 0x1_0001_4500_0000_00
    chips = range(len(slots))
    found = {
        "arch": dict.fromkeys(chips, "wormhole_b0"),
        "chips": {i: [x, y, 0, 0] for i, (x, y) in enumerate(slots)},
        "chip_unique_ids": {i: 1000 + i for i in chips},
        "ethernet_connections": [
            [{"chip": a, "chan": from_a + link}, {"chip": b, "chan": from_b + link}]
            for a, b, from_a, from_b in pairs
            for link in range(2)
        ],
        "ethernet_connections_to_remote_devices": [],
        "chips_with_mmio": [{i: i} for i in range(len(boards))],
        "harvesting": {
            i: {
                "noc_translation": True,
                "harvest_mask": HARVESTED_ROW,
                "dram_harvesting_mask": 0,
                "eth_harvesting_mask": 0,
                "pcie_harvesting_mask": 0,
            }
            for i in chips
        },
        "chip_to_boardtype": dict.fromkeys(chips, kind),
        "boards": [
            [{"board_id": first_id + i}, {"board_type": kind}, {"chips": each}]
            for i, each in enumerate(boards)
        ],
    }
    return _yaml(json.loads(json.dumps(found)))


def _blackhole(board: str) -> dict:
    kind, *harvested = BLACKHOLE[board]
    masks = dict(zip(_MASKS, harvested, strict=True))
    return {
        "arch": {0: "blackhole"},
        "chips": {},
        "chip_unique_ids": {0: kind << 36},
        "ethernet_connections": [],
        "ethernet_connections_to_remote_devices": [],
        "chips_with_mmio": [{0: 0}],
        "harvesting": {0: {"noc_translation": True, **masks, "l2cpu_harvesting_mask": 0}},
        "chip_to_boardtype": {0: board},
        "boards": [[{"board_id": kind << 36}, {"board_type": board}, {"chips": [0]}]],
    }


def _yaml(value: object) -> str:
    """Write flow style with unquoted number keys, because UMD reads them as numbers."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def environment(board: str, scratch: Path) -> dict[str, str]:
    """Return the variables for a later import of ttnn.

    ``scratch`` receives the description, a cache, and a root with a dummy compiler: kernels never
    run.
    """
    spec = importlib.util.find_spec("ttnn")
    assert spec is not None and spec.origin is not None, "ttnn is not installed here"
    package = Path(spec.origin).parent
    root = scratch / "root"
    compiler = root / "runtime/sfpi/compiler/bin/riscv-tt-elf-g++"
    compiler.parent.mkdir(parents=True, exist_ok=True)
    links = {"tt_metal": package / "tt_metal", "ttnn": package / "ttnn"}
    links["runtime/hw"] = package / "runtime/hw"
    for name, target in links.items():
        (root / name).unlink(missing_ok=True)  # possibly another Python
        (root / name).symlink_to(target)
    source = Path(__file__).with_name("stub_compiler.py").read_text()
    compiler.write_text(f"#!{sys.executable} -IS\n{source}")
    compiler.chmod(0o755)
    described = scratch / f"{board}.yaml"
    described.write_text(cluster_text(board))
    return {
        "TT_METAL_MOCK_CLUSTER_DESC_PATH": str(described),
        "TT_METAL_RUNTIME_ROOT": str(root),
        "TT_METAL_CACHE": str(scratch / "cache"),
        "TT_LOGGER_LEVEL": "fatal",
    }


def use(board: str, scratch: Path) -> None:
    """Set :func:`environment` in this process before the import of ttnn."""
    assert "ttnn" not in sys.modules
    os.environ.update(environment(board, scratch))
