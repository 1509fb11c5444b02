# make         print these lines
# make train   train a small GPT by readiness: once in one process, once as four processes; on
#              GPUs where there are some
# make test    every test: Python, C++, C++ under ThreadSanitizer
# make build   the environment .venv and the extension, nothing else
# make clean   remove all that the above made
#
# A fresh machine needs python3 (3.10 or newer, with venv), g++ (C++20), make and a package
# index. PYTHON, STEPS, PYTEST_ARGS and TORCH_INDEX may be set on the command line.

PYTHON ?= python3
STEPS ?= 40
PYTEST_ARGS ?=
# The CPU's torch is smaller; where there is an NVIDIA driver, the one with CUDA and its headers.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),https://pypi.org/simple,https://download.pytorch.org/whl/cpu)
# Where `test` leaves pytest's exit status, which make itself turns into 2.
STATUS_FILE ?= /dev/null

VENV := .venv
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.rrfp-installed

.DEFAULT_GOAL := help
.PHONY: help train test build clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

train: build
	@echo "rrfp: one process, four worker threads"
	$(PY) examples/train_gpt.py --ranks 4 --steps $(STEPS)
	@echo "rrfp: four processes"
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py --steps $(STEPS)

test: build
	@$(PY) -m pytest $(PYTEST_ARGS); status=$$?; echo $$status > $(STATUS_FILE); exit $$status

build: $(INSTALLED)
	@echo "rrfp: building what has changed of the C++ core; all of it takes minutes, without a word"
	@$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .

$(INSTALLED): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "rrfp: $(PYTHON) was not found; install Python 3.10 or newer, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"rrfp: Python 3.10 or newer is needed and $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=/path/to/newer/python3")'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "rrfp: $(PYTHON) lacks venv or ensurepip; install them (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo 'int main() { return [] { return 0; }(); }' | $${CXX:-g++} -std=c++20 -x c++ -fsyntax-only - || { echo "rrfp: no C++20 compiler as $${CXX:-g++}; install g++ 11 or newer, or set CXX" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade --retries 1 --constraint constraints.txt --extra-index-url $(TORCH_INDEX) torch
	$(PY) -m pip install --quiet --upgrade setuptools wheel pybind11 cmake ninja
	@echo "rrfp: building the C++ core, which takes minutes and says nothing meanwhile"
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@$(PY) -c 'import torch; torch.version.cuda and print("rrfp: the package index gave the CUDA build of torch", torch.__version__, "- larger than needed, and it works")'
	@touch $@

clean:
	rm -rf build dist .pytest_cache .hypothesis .ruff_cache rrfp.egg-info rrfp/_C*.so $(VENV)
	find rrfp tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2> /dev/null || true
