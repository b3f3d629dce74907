"""The devices Tilewright knows: sizes and rates that targets, plans and models of time read.

Figures are published or measured, as each row's ``source`` says. Imports no torch and starts no
device; the host is looked at only when :func:`describe_cpu` is called.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from tilewright.errors import CompileError, ConfigError
from tilewright.utils.registry import Registry

# A worker core does 4.096 TFLOP/s at LoFi and 1 GHz; 2, 3 and 4 phases take 2, 3 and 4 times as
# long. 64 cores a chip. Of the DRAM rate 240 to 265 GB/s are reached in practice.
_WORMHOLE_TFLOPS = MappingProxyType({"lofi": 262.0, "hifi2": 131.0, "hifi3": 87.0, "hifi4": 66.0})
_WORMHOLE = "Tenstorrent Wormhole, 64 workers at 1 GHz: published peak rates, 12 DRAM banks"

# Blackhole: 110 workers for kernels, at 1.35 GHz, with the cycles per phase of Wormhole.
_BLACKHOLE_TFLOPS = MappingProxyType(
    {"lofi": 608.0, "hifi2": 304.0, "hifi3": 203.0, "hifi4": 152.0}
)
_BLACKHOLE = "Tenstorrent Blackhole, 110 workers at 1.35 GHz: published peak rates, 2026-11"

WORMHOLE, BLACKHOLE = "wormhole", "blackhole"


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One kind of device; figures are per chip, and None where they are not known.

    ``grid``: worker cores (rows, columns). ``num_cores``: multiprocessors where there is no grid.
    ``l1_bytes``: usable per core. ``dram_bytes_per_s`` and ``link_bytes_per_s`` (one link, one
    direction; ``num_links`` between neighbouring chips) are rates; ``tflops`` in 1e12 a second, by
    fidelity (board) or format (GPU). ``architecture``: of a board's chips; ``num_banks`` of DRAM
    on a chip.
    """

    name: str
    target: str
    num_chips: int
    source: str
    grid: tuple[int, int] | None = None
    num_cores: int | None = None
    l1_bytes: int | None = None
    dram_bytes: int | None = None
    dram_bytes_per_s: float | None = None
    num_links: int | None = None
    link_bytes_per_s: float | None = None
    tflops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    architecture: str = ""
    num_banks: int = 0


@dataclass(frozen=True, slots=True)
class CpuDescription:
    """The processor this runs on; ``num_cores`` are those this process may use.

    ``num_physical_cores`` are the machine's, hyper-threads counted once, or None where the system
    does not tell. ``isa`` lists the instruction sets that matter for a product, as Linux spells
    them. ``family`` tells processors apart whose name a virtual machine hides.
    """

    model_name: str
    num_cores: int
    num_physical_cores: int | None
    isa: tuple[str, ...]
    family: str = ""

    @property
    def full_name(self) -> str:
        """The name, with the family where it is known."""
        return f"{self.model_name}, {self.family}" if self.family else self.model_name


def _wormhole(
    name: str, num_chips: int, *, grid: tuple[int, int] | None, num_links: int | None
) -> DeviceSpec:
    """A board or box of Wormhole chips, one target per kind."""
    return DeviceSpec(
        name.upper(),
        name,
        num_chips,
        _WORMHOLE,
        grid=grid,
        l1_bytes=1_393_312,
        dram_bytes=12_870_000_000,
        dram_bytes_per_s=288e9,
        num_links=num_links,
        link_bytes_per_s=12.5e9 if num_links is not None else None,
        tflops=_WORMHOLE_TFLOPS if grid is not None else MappingProxyType({}),
        architecture=WORMHOLE,
        num_banks=12,
    )


def _blackhole(name: str, num_chips: int, *, num_banks: int = 8) -> DeviceSpec:
    """Return the row of a Blackhole board or box. A bank has 4 GB and 64 GB/s."""
    return DeviceSpec(
        name.upper(),
        name,
        num_chips,
        _BLACKHOLE,
        grid=(10, 11),
        l1_bytes=1_393_312,
        dram_bytes=num_banks * 4_000_000_000,
        dram_bytes_per_s=num_banks * 64e9,
        num_links=2 if num_chips > 1 else None,
        link_bytes_per_s=25e9 if num_chips > 1 else None,
        tflops=_BLACKHOLE_TFLOPS,
        architecture=BLACKHOLE,
        num_banks=num_banks,
    )


DEVICES: Registry[DeviceSpec] = Registry("device")

BOARDS = (
    *("n150", "n300", "t3k", "tg"),
    *("p100", "p150", "p300", "qb2", "loudbox", "bh-galaxy"),
)
"""Targets whose devices are emulated and whose speed is predicted."""

CPU_BACKENDS = {"onnxruntime": "cpu", "native": "cpu-native"}
"""What can run the target cpu, and the target's full name with it."""

DEVICES.register("cpu", DeviceSpec("CPU", "cpu", 1, "the host; see describe_cpu"))
DEVICES.register("n150", _wormhole("n150", 1, grid=(8, 8), num_links=None))
DEVICES.register("n300", _wormhole("n300", 2, grid=(8, 8), num_links=2))
# Two links inside each N300 are published; two between boards are assumed.
DEVICES.register("t3k", _wormhole("t3k", 8, grid=(8, 8), num_links=2))
# Galaxy: its worker grid, rates and links are not published in the same terms.
DEVICES.register("tg", _wormhole("tg", 32, grid=None, num_links=None))
DEVICES.register("p100", _blackhole("p100", 1, num_banks=7))
DEVICES.register("p150", _blackhole("p150", 1))
DEVICES.register("p300", _blackhole("p300", 2))
# QuietBox 2: two p300 in a ring. LoudBox: eight p150.
DEVICES.register("qb2", _blackhole("qb2", 4))
DEVICES.register("loudbox", _blackhole("loudbox", 8))
DEVICES.register("bh-galaxy", _blackhole("bh-galaxy", 32))
DEVICES.register(
    "h200",
    DeviceSpec(
        "H200",
        "cuda",
        1,
        "NVIDIA H200: reads and matrix rates measured with streaming kernels and 8192^3 products",
        num_cores=132,
        dram_bytes=143_771 * 2**20,
        dram_bytes_per_s=4.35e12,
        tflops=MappingProxyType({"bf16": 754.0, "fp8": 1335.0}),
    ),
)

_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimddp")
_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPUINFO = Path("/proc/cpuinfo")
_CUDA_DRIVER = "libcuda.so.1"


def get_device(name: str) -> DeviceSpec:
    """The device called ``name``, in any case.

    Raises:
        ConfigError: for an unknown name, listing the known ones.
    """
    return DEVICES[name.lower()]


def target_options(name: str) -> list[str]:
    """The options of a command that mean the target of this full name, whatever is here."""
    backend = next((each for each, full in CPU_BACKENDS.items() if full == name), None)
    return ["--target", name] if backend is None else ["--target", "cpu", "--backend", backend]


def check_ranks(target: str, num_ranks: int) -> None:
    """Refuse ranks of a board, which deals a model over its own chips, and of ONNX Runtime, which
    has no exchange. ``target``: the full name.

    Raises:
        ConfigError: for more ranks than one, with what there is in their place.
    """
    if num_ranks == 1:
        return
    if target == CPU_BACKENDS["onnxruntime"]:
        raise ConfigError(
            f"{num_ranks} ranks of backend onnxruntime: it exchanges nothing between ranks; "
            "allowed: --backend native (a C++ compiler), or without --tensor-parallel"
        )
    if target in BOARDS:
        chips = ", ".join(f"{each} ({DEVICES[each].num_chips})" for each in BOARDS)
        raise ConfigError(
            f"{num_ranks} ranks of target {target}: a board deals a model over its own chips; "
            f"allowed: without --tensor-parallel, and as --target a board by its chips: {chips}"
        )


def check_gpu() -> None:
    """Refuse what needs a GPU where Triton or a GPU is missing, without importing either's library.

    Triton's interpreter (``TRITON_INTERPRET=1``) needs no GPU.

    Raises:
        CompileError: saying which of the two is missing.
    """
    check_triton()
    if os.environ.get("TRITON_INTERPRET") != "1" and not num_gpus():
        raise CompileError(
            "target cuda: this machine has no GPU that its driver knows; allowed: --target cpu or "
            "reference, or a machine with an NVIDIA GPU and a CUDA build of torch"
        )


def check_triton() -> None:
    """Refuse what target cuda writes or runs where Triton is missing, without importing it.

    Raises:
        CompileError: saying how it is installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise CompileError(
            "target cuda: triton is not installed; allowed: pip install -e '.[cuda]' in the "
            "clone, or --target cpu or reference"
        )


def num_gpus() -> int:
    """How many GPUs the CUDA driver shows this process; 0 where there is no driver."""
    try:
        driver = ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


def describe_cpu(cpuinfo: Path = _CPUINFO) -> CpuDescription:
    """The host's processor, from the system's own table; unknown parts are said to be so."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""  # not Linux: the platform module knows less, but something
    fields: dict[str, str] = {}
    cores: set[tuple[str, str]] = set()
    package = "0"
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if not separator:
            continue
        key, value = key.strip().lower(), value.strip()
        fields.setdefault(key, value)
        if key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    flags = set((fields.get("flags") or fields.get("features") or "").split())
    return CpuDescription(
        model_name=fields.get("model name") or platform.processor() or "unknown processor",
        num_cores=_usable_cores(),
        num_physical_cores=len(cores) or None,
        isa=tuple(flag for flag in _ISA_FLAGS if flag in flags),
        family=f"family {fields['cpu family']}" if "cpu family" in fields else "",
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_cpus(topology: Path = _TOPOLOGY) -> tuple[int, ...]:
    """The numbers of the CPUs that this process may run on, those of a package side by side, and
    in it the hyper-threads of a core; in order of their numbers where the system tells no more.
    """
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(os.cpu_count() or 1))

    def place(cpu: int) -> tuple[int, int, int]:
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            package, core = (
                int((folder / name).read_text(encoding="ascii"))
                for name in ("physical_package_id", "core_id")
            )
        except (OSError, ValueError):
            return 0, 0, cpu
        return package, core, cpu

    return tuple(sorted(os.sched_getaffinity(0), key=place))
