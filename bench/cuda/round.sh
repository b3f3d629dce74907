#!/usr/bin/env bash
# A round on one GPU: tests, rows and load tests, part by part,
# each within seconds of its own, so that a machine at hand for an hour is used whole.
#
#   round.sh OUT PART[=SECONDS] ...     OUT: a folder that gets PART.log and rows as JSON lines
#
#   tests      all tests that need a GPU (WORKERS processes)
#   rows       bench-cuda (ROWS: names of rows, 8b-* fits)
#   streams    SHAPE served, STREAMS as USERS:REQUESTS, INPUT tokens in and OUTPUT out
#   poisson    the same, RATES requests a second that arrive by chance, for PERIOD seconds each
#   contest    the contest's load on SHAPE (LEVELS, FLUSH=1: an empty prefix cache before each)
#              these three also joined, as in streams-poisson: one start of a server for all of them,
#              where the contest is among them with a prefix cache and --step-ms 0
#   start      seconds from a server's start to /health, twice: caches cold, or as they were, and warm
#   overhead   128 tokens in and 256 out at 1 user and at USERS: what serving adds to a bare engine
#   json       USERS, half of them with a schema
#   intruder   a prompt of LONG tokens into eight streams
#   chat       64 chats of eight turns
#   invariant  500 requests alone and in company, of a strict server
#   soak       SOAK requests of all kinds, ROUNDS times, as chat
#   batch      BATCH rows through `tilewright batch`
#   generate   the generator of engines, on the shape it is tested with
#   sanitize   sanitize.sh
#
# PYTHON: the interpreter; TARGET: cuda; OPTIONS: more of `serve`; OUR_PORT: 18200; THEIRS: a command
# that starts another server of OpenAI's API on port 18201, which `streams`, `poisson`, `contest`,
# `chat` (which wants its prefix cache, counts of cached tokens and POST /reset_prefix_cache) and
# `start` have behind ours. WORDS and THEIR_WORDS: of a prompt of the contest and of what begins all
# chats, of which shapes have as many tokens (1,010 of 305 words, for their tokens are bytes; a
# made-up tokenizer may have one a word).
set -u
[ $# -ge 2 ] || { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2; }
PYTHON=${PYTHON:-python} TARGET=${TARGET:-cuda} OPTIONS=${OPTIONS:-} THEIRS=${THEIRS:-}
SHAPE=${SHAPE:-llama-3.1-8b} STREAMS=${STREAMS:-1:4 32:128 64:256} INPUT=${INPUT:-1024}
RATES=${RATES:-12 19} PERIOD=${PERIOD:-20} USERS=${USERS:-64}
OUTPUT=${OUTPUT:-256} LEVELS=${LEVELS:-1 2 4 8 16 32 64} LONG=${LONG:-64000} SOAK=${SOAK:-2000}
ROUNDS=${ROUNDS:-1} BATCH=${BATCH:-2000} ROWS=${ROWS:-8b-*} WORKERS=${WORKERS:-10}
VOCABULARY=${VOCABULARY:-100000} SEATS=${SEATS:-256} CONTEXT=${CONTEXT:-4096} FLUSH=${FLUSH:-}
WORDS=${WORDS:-305} THEIR_WORDS=${THEIR_WORDS:-1010} DRAWN=
OURS=${OUR_PORT:-18200}
mkdir -p "$1" && out=$(cd "$1" && pwd) || exit 2
shift
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
CLI='import sys; from tilewright.cli.main import main; sys.exit(main())'
tilewright() { "$PYTHON" -P -c "$CLI" "$@"; }

# The chat template of shapes, which have none, and a server that is ended with its part.
template=$out/chat.jinja
echo "{% for m in messages %}{{ m['content'] }} {% endfor %}" >"$template"
ready() { # PORT: until /health says 200, or the server is gone
    local began=$EPOCHREALTIME
    kill -0 "$server" || return 1
    until "$PYTHON" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$1/health')" \
        2>/dev/null; do kill -0 "$server" 2>/dev/null || return 1; sleep 0.2; done
    echo "port $1: /health after $(awk "BEGIN {print $EPOCHREALTIME - $began}") s"
}
serve() { # more options of `serve`
    # shellcheck disable=SC2086
    "$PYTHON" -P -c "$CLI" serve "shape:$SHAPE" --target "$TARGET" --precision bf16 --max-num-seqs "$SEATS" \
        --max-model-len "$CONTEXT" --admin --chat-template "$template" --port $OURS $OPTIONS "$@" &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server' EXIT
    ready $OURS
}
load() { # PLAN, more options: of whichever server is at $port
    tilewright bench --url "http://127.0.0.1:$port" --results "$out/served.jsonl" --json \
        --vocabulary "$VOCABULARY" --plan "$@"
}
both() { # a function: with our server, then with theirs
    port=$OURS
    serve "${@:2}" && "$1" || return 1
    kill "$server"
    wait "$server"
    [ -n "$THEIRS" ] || return 0
    $THEIRS &
    server=$! port=18201 WORDS=$THEIR_WORDS FLUSH= DRAWN=1
    ready $port && "$1"
    local code=$?
    kill "$server"
    wait "$server"
    return $code
}

tests() {
    "$PYTHON" -P -m pytest -v -m 'gpu or multigpu' -n "$WORKERS" --dist worksteal -rfE
}
rows() { python -m bench bench-cuda --rows $ROWS --repeats "${REPEATS:-5}" --results "$out/rows.jsonl"; }
load_streams() {
    for one in $STREAMS; do
        load streams --concurrency "${one%:*}" --requests "${one#*:}" --input-tokens "$INPUT" \
            --output-tokens "$OUTPUT" --seed $((${one%:*} + 7))
    done
}
load_poisson() {
    for rate in $RATES; do
        load streams --rate "$rate" --requests "$(awk "BEGIN {print int($rate * $PERIOD) + 1}")" \
            --input-tokens "$INPUT" --output-tokens "$OUTPUT" --seed 11
    done
}
load_contest() { # answers are as long on both sides; only ours says that its weights are random
    # shellcheck disable=SC2086
    load contest ${FLUSH:+--flush} ${DRAWN:+--drawn-lengths} --levels $LEVELS --input-tokens "$WORDS" \
        --output-tokens 1024
}
all_loads() {
    local code=0
    for one in ${loads//-/ }; do "load_$one" || code=1; done
    return $code
}
under_load() { # by both servers
    local options=--no-prefix-cache
    [[ $loads != *contest* ]] || options=--step-ms=0
    both all_loads $options
}
start() { both true && both true; }
overhead() {
    serve --no-prefix-cache && port=$OURS load overhead --concurrency "$USERS" --requests 256 \
        --input-tokens 128 --output-tokens 256
}
json() {
    serve && port=$OURS load json --concurrency "$USERS" --requests 256 --input-tokens 128 \
        --output-tokens 256
}
intruder() {
    port=$OURS CONTEXT=$((LONG + 2000)) serve --no-prefix-cache &&
        port=$OURS load intruder --concurrency 8 --input-tokens 128 --output-tokens 2000 \
        --long-tokens "$LONG"
}
load_chat() {
    load chat --flush --rounds "$ROUNDS" --concurrency 64 --long-tokens "$WORDS" \
        --input-tokens $((WORDS / 15))
}
chat() { both load_chat; }
invariant() { serve --arithmetic strict && port=$OURS load invariant --concurrency 64 --requests 500; }
soak() { serve && port=$OURS load soak --concurrency 64 --requests "$SOAK" --rounds "$ROUNDS"; }
batch() {
    python -m bench make-batch --rows "$BATCH" --token-ids "$VOCABULARY" -o "$out/batch.jsonl" &&
        tilewright batch "$out/batch.jsonl" -o "$out/answers.jsonl" --model "shape:$SHAPE" \
            --target "$TARGET" --precision bf16 --no-prefix-cache --json
}
generate() {
    env -u TARGET PYTHON="$PYTHON" WORKSPACE="$out/engine" bash demo/engine_generator/run.sh
}
sanitize() { bash bench/cuda/sanitize.sh; }

export -f tilewright ready serve load both tests rows load_streams load_poisson load_contest load_chat \
    all_loads under_load start overhead json intruder chat invariant soak batch generate sanitize
export CLI PYTHON TARGET OPTIONS THEIRS SHAPE STREAMS INPUT OUTPUT RATES PERIOD USERS LEVELS LONG SOAK \
    ROUNDS BATCH ROWS \
    WORKERS VOCABULARY SEATS CONTEXT FLUSH WORDS THEIR_WORDS DRAWN OURS out template
status=0
for part in "$@"; do
    name=${part%%=*} seconds=${part#*=}
    [ "$seconds" != "$part" ] || seconds=0 # no limit
    does=$name functions=$name
    [[ $name != @(streams|poisson|contest)* ]] || does=under_load functions="load_${name//-/ load_}"
    # shellcheck disable=SC2086
    declare -F $functions >/dev/null || { echo "round.sh: no part $name" >&2; exit 2; }
    export loads=$name
    began=$(date +%s)
    timeout --kill-after=10 "$seconds" bash -c "$does" >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit $code after $(($(date +%s) - began)) s"
    tail -n 12 "$out/$name.log" | cut -c1-1500
    [ $code = 0 ] || status=1
done
exit $status
