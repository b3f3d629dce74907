"""Engines that Tilewright is compared with, each behind the same three questions.

`PEERS` names them; a peer's library is imported in its own worker process alone.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from tilewright.utils.registry import Registry


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine to compare with: its library is imported as ``module``, pip's ``package``.
    ``serves_many``: whether several users at a time are measured.
    """

    name: str
    module: str
    package: str
    serves_many: bool = False

    def missing(self) -> str | None:
        """Why it cannot be run here, with the remedy; None where it is installed."""
        if importlib.util.find_spec(self.module) is not None:
            return None
        return f"not installed: pip install {self.package}"


PEERS: Registry[Peer] = Registry("peer")

for _peer in (
    Peer("llama.cpp", "llama_cpp", "llama-cpp-python", serves_many=True),
    Peer("onnx-genai", "onnxruntime_genai", "onnxruntime-genai"),
    Peer("openvino", "openvino_genai", "openvino-genai"),
):
    PEERS.register(_peer.name, _peer)
