"""A server in a process of its own, with the engine that has no model: ``PORT [key=value ...]``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.serve.fronts import fake_command, load_bytes  # noqa: E402
from tilewright.serve.web.server import serve  # noqa: E402
from tilewright.serve.web.server_log import tell  # noqa: E402
from tilewright.serve.web.settings import ServerConfig  # noqa: E402

if __name__ == "__main__":
    changes = dict(each.split("=") for each in sys.argv[2:])
    settings = ServerConfig(port=int(sys.argv[1]), **{k: float(v) for k, v in changes.items()})
    tell_port = lambda port: tell(f"listening on {port}")  # noqa: E731
    sys.exit(serve(settings, fake_command(), load_bytes, on_listening=tell_port))
