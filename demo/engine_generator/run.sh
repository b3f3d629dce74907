#!/usr/bin/env bash
# Writes workspace/engine.py and workspace/results.log; needs no network. PYTHON names an interpreter
# that has torch and Tilewright. The model is /target's where there is one, else target's beside this
# file, whose weights are made up where it has none. TILEWRIGHT_GENERATE_S limits the time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
PYTHON="${PYTHON:-python3}"
TARGET="${TARGET:-$([ -f /target/model_config.json ] && echo /target || echo target)}"
"$PYTHON" -c 'from importlib.util import find_spec; exit(not all(map(find_spec, ("torch", "tilewright"))))' || {
    echo "run.sh: $PYTHON lacks torch or Tilewright; set PYTHON to an interpreter that has both" >&2
    exit 2
}
if [ "$TARGET" = target ] && ! compgen -G 'target/weights/*.pt' >/dev/null \
    && ! compgen -G 'target/weights/*.bin' >/dev/null \
    && ! compgen -G 'target/weights/*.safetensors' >/dev/null; then
    "$PYTHON" -P scripts/generate_toy_weights.py --config target/model_config.json \
        --output target/weights/model.pt
fi
exec "$PYTHON" -P ../generate_engine.py --config "$TARGET/model_config.json" \
    --weights "$TARGET/weights" --output "${WORKSPACE:-workspace}"
