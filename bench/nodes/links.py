"""Network namespaces whose links have a rate and, where it is asked for, a delay: each is a
machine to what runs there. A bridge joins them, or `relay.cpp`, which holds every frame back.

Needs root, `ip` and `tc`. Made anew each time, and taken away; what a run left that was killed is
taken away by the next.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.child import Child
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.targets.cpu.native.build import find_compiler

_NAME, _NET = "twn", "10.213.77"
_NAMESPACES, _LINKS = Path("/run/netns"), Path("/sys/class/net")
_RELAY = Path(__file__).with_name("relay.cpp")
_KERNEL = "root, on a kernel with veth and tbf"


@dataclass(frozen=True, slots=True)
class Link:
    """Gigabits a second each way, and the microseconds that a frame takes besides, each way."""

    gigabits: float
    delay_us: int = 0


def read_link(text: str) -> Link:
    """The link that ``2.5``, or with a delay ``2.5+100us``, names.

    Raises:
        ConfigError: for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(?:\+(\d{1,6})us)?", text)
    if found is None or not 0.001 <= float(found[1]) <= 100:
        allowed = "free, or gigabits a second, 0.001 to 100, and a delay each way, as in 1+100us"
        raise ConfigError(f"--links {text}; allowed: {allowed}")
    return Link(float(found[1]), int(found[2] or 0))


def address(node: int) -> str:
    """The IPv4 address of the machine that a node runs on."""
    return f"{_NET}.{node + 1}"


def inside(node: int) -> list[str]:
    """What begins a command that runs on a node's machine."""
    return ["ip", "netns", "exec", f"{_NAME}{node}"]


@contextlib.contextmanager
def machines(count: int, link: Link) -> Iterator[None]:
    """So many machines, each behind such a link.

    Raises:
        ConfigError: where this user may not make them, or the kernel cannot.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _make(count, link.gigabits)
        ends = [f"{_NAME}h{node}" for node in range(count)]
        with _relayed(ends, link.delay_us) if link.delay_us else _bridged(ends):
            yield
    finally:
        _remove()
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """End as an exception does, through what takes the machines away."""
    raise SystemExit(128 + number)


def _make(count: int, gigabits: float) -> None:
    """The machines and their links, which lead nowhere yet."""
    _remove()
    limit = f"tbf rate {int(gigabits * 1000)}mbit burst 256kb latency 100ms"
    for node in range(count):
        here, there = f"{_NAME}h{node}", f"{_NAME}p{node}"
        _do(f"ip netns add {_NAME}{node}")
        _do(f"ip link add {here} type veth peer name {there}")
        _do(f"ip link set {there} address 02:00:00:00:00:{node:02x} netns {_NAME}{node}")
        _do(f"ip link set {here} up")
        _do(f"ip netns exec {_NAME}{node} ip addr add {address(node)}/24 dev {there}")
        _do(f"ip netns exec {_NAME}{node} ip link set {there} up")
        _do(f"ip netns exec {_NAME}{node} ip link set lo up")
        _do(f"tc qdisc add dev {here} root {limit}")
        _do(f"ip netns exec {_NAME}{node} tc qdisc add dev {there} root {limit}")


@contextlib.contextmanager
def _bridged(ends: Sequence[str]) -> Iterator[None]:
    _do(f"ip link add {_NAME}br type bridge")
    _do(f"ip link set {_NAME}br up")
    for end in ends:
        _do(f"ip link set {end} master {_NAME}br")
    yield


@contextlib.contextmanager
def _relayed(ends: Sequence[str], delay_us: int) -> Iterator[None]:
    compiler = find_compiler()
    if compiler is None:
        raise ConfigError("links with a delay: no C++ compiler; allowed: g++ or clang++ (CXX=path)")
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/relay"
        _do([*compiler, "-std=c++20", "-O2", str(_RELAY), "-o", program], "a compiler of C++20")
        with Child([program, str(delay_us), *ends], has_pipes=True, what="the relay") as relay:
            if relay.read_line(10) != b"ready\n":
                said = relay.stop().last
                raise ConfigError(f"{said}; allowed: root, on a kernel with packet sockets")
            yield


def _remove() -> None:
    """Take all machines away, those of a larger run that was killed too."""
    for kind, folder in (("netns", _NAMESPACES), ("link", _LINKS)):
        for found in sorted(folder.glob(f"{_NAME}*")):
            _try(f"ip {kind} del {found.name}")


def _try(command: str) -> None:
    """Take away what may not be there; where there is no such program, nothing is."""
    with contextlib.suppress(OSError):
        subprocess.run(command.split(), capture_output=True, check=False)


def _do(command: str | Sequence[str], allowed: str = _KERNEL) -> None:
    words = command.split() if isinstance(command, str) else command
    try:
        done = subprocess.run(words, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{words[0]}: {error}; allowed: root, with ip and tc") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise ConfigError(f"{' '.join(words)}: {said}; allowed: {allowed}")
