#!/usr/bin/env bash
# Writes workspace/engine.py and workspace/results.log; needs no network. PYTHON names an interpreter
# that has torch and Tilewright. The model is /target's where there is one, else target's beside this
# file, whose weights are made up where they are missing. TILEWRIGHT_GENERATE_S limits the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python3}"
TARGET="${TARGET:-$([ -f /target/model_config.json ] && echo /target || echo target)}"
if [ "$TARGET" = target ] && [ ! -f target/weights/model.pt ]; then
    "$PYTHON" -P scripts/generate_toy_weights.py --config target/model_config.json \
        --output target/weights/model.pt
fi
exec "$PYTHON" -P ../generate_engine.py --config "$TARGET/model_config.json" \
    --weights "$TARGET/weights" --output "${WORKSPACE:-workspace}"
