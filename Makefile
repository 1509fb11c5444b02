# make         print these lines
# make train   train a small GPT by readiness: once in one process, once as four processes; on
#              GPUs where there are some
# make test    every test: Python, C++, C++ under ThreadSanitizer, on all cores (up to 8); built
#              with CUDA, whose headers it fetches (200 MB) where PyTorch has brought none
# make build   the environment .venv and the extension, nothing else; ". .venv/bin/activate" then
#              makes its python and torchrun those of your shell
# make clean   remove all that the above made
#
# A fresh machine needs python3 (3.10 or newer, with venv), g++ (C++20), make and a package
# index. May be set on the command line, such as make train STEPS=5:
#   PYTHON         python3 of another name or place
#   TORCH_INDEX    where torch comes from
#   STEPS          of training (40)
#   TEST_JOBS      processes that test (cores + 1, up to 8: many wait); 0: pytest alone
#   PYTEST_ARGS    more for pytest, such as PYTEST_ARGS="-k orders"
#   CUDA_HEADERS   none: tests on a build as for CPUs

PYTHON ?= python3
STEPS ?= 40
PYTEST_ARGS ?=
TEST_JOBS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n + 1 : 8)))
# The CPU's torch is smaller; where there is an NVIDIA driver, the one with CUDA and its headers.
TORCH_INDEX ?= $(if $(shell command -v nvidia-smi),https://pypi.org/simple,https://download.pytorch.org/whl/cpu)
# What the CUDA sources include, to compile and link them on any machine. Of NCCL it is one header;
# its library is not used.
CUDA_HEADERS ?= nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 \
                nvidia-nccl-cu13==2.28.9
# Where `test` leaves pytest's exit status, which make itself turns into 2.
STATUS_FILE ?= /dev/null

VENV := .venv
PY := $(VENV)/bin/python
# The CUDA version of the installed PyTorch, or None; not by importing it, which wants numpy.
TORCH_CUDA := $(PY) -c 'import importlib.util as u, runpy; print(runpy.run_path(u.find_spec("torch").submodule_search_locations[0] + "/version.py")["cuda"])'
TOOLS := $(VENV)/.rrfp-tools
WITH_HEADERS := $(VENV)/.rrfp-cuda-headers
INSTALLED := $(VENV)/.rrfp-installed

.DEFAULT_GOAL := help
.PHONY: help train test build clean
.NOTPARALLEL:

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

# As many threads a rank as the script takes; torchrun would set 1, and say so at length.
train: export OMP_NUM_THREADS ?= $(shell n=$$(nproc); echo $$((n < 4 ? 1 : n / 4)))
train: build
	@echo "rrfp: one process, four worker threads"
	$(PY) examples/train_gpt.py --ranks 4 --steps $(STEPS)
	@echo "rrfp: four processes"
	$(PY) -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py --steps $(STEPS)

# Hundreds of processes import rrfp: without compiled files beside its sources each compiles it.
test: export PYTHONDONTWRITEBYTECODE =
test: $(if $(strip $(CUDA_HEADERS)),$(WITH_HEADERS)) build
	@$(PY) -m pytest $(if $(filter-out 0,$(TEST_JOBS)),-n $(TEST_JOBS) --dist loadfile) $(PYTEST_ARGS); status=$$?; echo $$status > $(STATUS_FILE); exit $$status

build: $(INSTALLED)
	@echo "rrfp: building what has changed of the C++ core; all of it takes minutes, without a word"
	@$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .

# Everything that a build needs and rrfp itself is not. From 13 on, headers of CUDA include some that
# PyTorch's own packages leave out.
$(TOOLS): constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "rrfp: $(PYTHON) was not found; install Python 3.10 or newer, or run make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit(f"rrfp: Python 3.10 or newer is needed and $(PYTHON) is {v[0]}.{v[1]}; run make PYTHON=/path/to/newer/python3")'
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "rrfp: $(PYTHON) lacks venv or ensurepip; install them (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo 'int main() { return [] { return 0; }(); }' | $${CXX:-g++} -std=c++20 -x c++ -fsyntax-only - || { echo "rrfp: no C++20 compiler as $${CXX:-g++}; install g++ 11 or newer, or set CXX" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade --retries 1 --constraint constraints.txt --extra-index-url $(TORCH_INDEX) torch
	$(PY) -m pip install --quiet --upgrade setuptools wheel pybind11 cmake ninja
	@cuda=$$($(TORCH_CUDA)); test $$cuda = None || echo "rrfp: the package index gave the build of torch for CUDA $$cuda; larger than needed without a GPU, and it works"
	@cuda=$$($(TORCH_CUDA)); case $$cuda in 13.*) $(PY) -m pip install --quiet --no-deps "nvidia-cuda-crt==$$cuda.*" "nvidia-cuda-cccl==$$cuda.*";; esac
	@touch $@

# A PyTorch with CUDA has brought the runtime and NCCL, in the versions it works with.
$(WITH_HEADERS): $(TOOLS)
	@test "$$($(TORCH_CUDA))" != None || { echo "rrfp: fetching the headers of CUDA and NCCL"; $(PY) -m pip install --quiet --no-deps $(CUDA_HEADERS); }
	@touch $@

$(INSTALLED): pyproject.toml $(TOOLS)
	@echo "rrfp: building the C++ core, which takes minutes and says nothing meanwhile"
	$(PY) -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $@

clean:
	rm -rf build dist .pytest_cache .hypothesis .ruff_cache rrfp.egg-info rrfp/_C*.so $(VENV)
	find rrfp tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2> /dev/null || true
