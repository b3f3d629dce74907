#!/usr/bin/env bash
# Load tests of a served shape on a GPU, and of another server after it.
#
#   round.sh OUT PART[=SECONDS] ...     OUT: a folder that gets PART.log and rows as JSON lines
#
#   streams    SHAPE served, STREAMS as USERS:REQUESTS, INPUT tokens in and OUTPUT out
#   poisson    the same, RATES requests a second at random times, for PERIOD seconds each
#   contest    rising LEVELS of users on SHAPE (FLUSH=1: an empty prefix cache before each)
#              Joined, as in streams-poisson: a single start of a server for all of them. With
#              contest among them it has a prefix cache and --max-prefill-ms 0
#
# PYTHON: the interpreter; TARGET: cuda; OPTIONS: more of `serve`; OUR_PORT: 18200; THEIRS: a command
# that starts another server of OpenAI's API on port 18201. WORDS and THEIR_WORDS: words of a prompt
# of the contest (1,010 tokens in 305 words, if the tokens are bytes). `tilewright bench --url --scenario`
# has further loads.
set -u
[ $# -ge 2 ] || { sed -n '2,/^set -u/s/^# \{0,1\}//p' "$0" | sed '$d' >&2; exit 2; }
PYTHON=${PYTHON:-python} TARGET=${TARGET:-cuda} OPTIONS=${OPTIONS:-} THEIRS=${THEIRS:-}
SHAPE=${SHAPE:-llama-3.1-8b} STREAMS=${STREAMS:-1:4 32:128 64:256} INPUT=${INPUT:-1024}
RATES=${RATES:-12 19} PERIOD=${PERIOD:-20} OUTPUT=${OUTPUT:-256} LEVELS=${LEVELS:-1 2 4 8 16 32 64}
VOCABULARY=${VOCABULARY:-100000} SEQUENCES=${SEQUENCES:-256} CONTEXT=${CONTEXT:-4096} FLUSH=${FLUSH:-}
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
    "$PYTHON" -P -c "$CLI" serve "shape:$SHAPE" --target "$TARGET" --precision bf16 --max-num-seqs "$SEQUENCES" \
        --max-model-len "$CONTEXT" --admin --chat-template "$template" --port $OURS $OPTIONS "$@" &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server' EXIT
    ready $OURS
}
load() { # SCENARIO, more options: of whichever server is at $port
    tilewright bench --url "http://127.0.0.1:$port" --results "$out/served.jsonl" --json \
        --vocabulary "$VOCABULARY" --scenario "$@"
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
    local options=--no-enable-prefix-caching
    [[ $loads != *contest* ]] || options=--max-prefill-ms=0
    both all_loads $options
}

export -f tilewright ready serve load both load_streams load_poisson load_contest all_loads under_load
export CLI PYTHON TARGET OPTIONS THEIRS SHAPE STREAMS INPUT OUTPUT RATES PERIOD LEVELS VOCABULARY \
    SEQUENCES CONTEXT FLUSH WORDS THEIR_WORDS DRAWN OURS out template
status=0
for part in "$@"; do
    name=${part%%=*} seconds=${part#*=}
    [ "$seconds" != "$part" ] || seconds=0 # no limit
    functions="load_${name//-/ load_}"
    # shellcheck disable=SC2086
    declare -F $functions >/dev/null || { echo "round.sh: no part $name" >&2; exit 2; }
    export loads=$name
    began=$(date +%s)
    timeout --kill-after=10 "$seconds" bash -c under_load >"$out/$name.log" 2>&1
    code=$?
    echo "== $name: exit $code after $(($(date +%s) - began)) s"
    tail -n 12 "$out/$name.log" | cut -c1-1500
    [ $code = 0 ] || status=1
done
exit $status
