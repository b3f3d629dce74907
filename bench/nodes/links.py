"""Network namespaces on one bridge, whose links have a rate: each is a machine to what runs there.

Needs root, `ip` and `tc`. Made anew each time, and taken away; what a run left that was killed is
taken away by the next.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tilewright.compiler.errors import ConfigError

_NAME, _NET = "twn", "10.213.77"
_NAMESPACES, _LINKS = Path("/run/netns"), Path("/sys/class/net")


def address(node: int) -> str:
    """The IPv4 address of the machine that a node runs on."""
    return f"{_NET}.{node + 1}"


def inside(node: int) -> list[str]:
    """What begins a command that runs on a node's machine."""
    return ["ip", "netns", "exec", f"{_NAME}{node}"]


@contextlib.contextmanager
def machines(count: int, gigabits: float) -> Iterator[None]:
    """So many machines, the links of which send and receive at most at this rate.

    Raises:
        ConfigError: where this user may not make them, or the kernel cannot.
    """
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _make(count, gigabits)
        yield
    finally:
        _remove()
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    """End as an exception does, through what takes the machines away."""
    raise SystemExit(128 + number)


def _make(count: int, gigabits: float) -> None:
    _remove()
    _do(f"ip link add {_NAME}br type bridge")
    _do(f"ip link set {_NAME}br up")
    limit = f"tbf rate {int(gigabits * 1000)}mbit burst 256kb latency 100ms"
    for node in range(count):
        here, there = f"{_NAME}h{node}", f"{_NAME}p{node}"
        _do(f"ip netns add {_NAME}{node}")
        _do(f"ip link add {here} type veth peer name {there}")
        _do(f"ip link set {there} netns {_NAME}{node}")
        _do(f"ip link set {here} master {_NAME}br up")
        _do(f"ip netns exec {_NAME}{node} ip addr add {address(node)}/24 dev {there}")
        _do(f"ip netns exec {_NAME}{node} ip link set {there} up")
        _do(f"ip netns exec {_NAME}{node} ip link set lo up")
        _do(f"tc qdisc add dev {here} root {limit}")
        _do(f"ip netns exec {_NAME}{node} tc qdisc add dev {there} root {limit}")


def _remove() -> None:
    """Take all machines away, those of a larger run that was killed too."""
    for kind, folder in (("netns", _NAMESPACES), ("link", _LINKS)):
        for found in sorted(folder.glob(f"{_NAME}*")):
            _try(f"ip {kind} del {found.name}")


def _try(command: str) -> None:
    """Take away what may not be there; where there is no such program, nothing is."""
    with contextlib.suppress(OSError):
        subprocess.run(command.split(), capture_output=True, check=False)


def _do(command: str) -> None:
    try:
        done = subprocess.run(command.split(), capture_output=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{command}: {error}; allowed: root, with ip and tc") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise ConfigError(f"{command}: {said}; allowed: root, on a kernel with veth and tbf")
