# Everything from a clone to a served model. `make help` lists the targets.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PYTRITON := nvidia-pytriton==0.7.0

# Given on the command line.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(if $(shell \
  $(name) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' \
  >/dev/null 2>&1 && echo yes),$(name))))
ARGS ?=
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup check-python serve demo golden test test-long equivalence \
  kernels-interpret kernels-aot bench-host bench-text bench-cpu bench-peers bench-gpu \
  perf-analyzer check clean

help:
	@echo 'make setup        virtual environment in $(VENV), dependencies, tritonserver, the model'
	@echo 'make serve        serve the model; ARGS="--http-port 9000 --max-num-seqs 16 ..." for options'
	@echo 'make demo         start a server, stream one chat answer, show the timings, stop'
	@echo 'make golden       compare served token ids with the reference'
	@echo 'make test         check, then the test suite (6 to 10 minutes)'
	@echo 'make test-long    the long tests'
	@echo 'make equivalence  the same tokens under every schedule: the full product (15 minutes)'
	@echo 'make kernels-interpret  the kernels in an interpreter of Triton kernels, without a GPU'
	@echo 'make kernels-aot  the kernels compiled for GPUs of three generations, without one'
	@echo 'make bench-host   what scheduling costs on the host, without a model'
	@echo 'make bench-text   what moving text costs, through tritonserver, without a model'
	@echo 'make bench-cpu    tokens per second on this CPU, offline and served, float32 and int8'
	@echo 'make bench-peers  the same workload through other engines, those that ARGS name'
	@echo 'make bench-gpu    kernels and engine on a GPU, in under 8 minutes; ARGS="--smoke" without'
	@echo 'make perf-analyzer streams, then random data, from the load generator of tritonserver'
	@echo 'make check        lint, format, types, import rules, sizes'
	@echo 'make clean        remove $(VENV) and caches; pulled models stay in ~/.cache/pagestream'
	@echo
	@echo 'All of them do the set-up first if it is needed, and reuse it if it is there.'
	@echo
	@echo 'PYTHON=python3.12     the Python to make the virtual environment from (3.11 or 3.12)'
	@echo 'PIP_ARGS="..."        more arguments for pip. Where pip would take the CUDA build of torch'
	@echo '                      and you want the smaller CPU build, name the directory or page that'
	@echo '                      has its wheels: PIP_ARGS="--find-links DIRECTORY_OR_URL"'

setup: $(INSTALLED)
	@$(BIN)/pagestream model pull >/dev/null

check-python:
	@test -n "$(PYTHON)" || { \
	  echo 'error: no Python 3.11 or 3.12 found. What to do: apt-get install python3 python3-venv' >&2; \
	  echo '       (or make PYTHON=/path/to/python3.11)' >&2; exit 1; }
	@$(PYTHON) -c '' || { echo 'error: PYTHON=$(PYTHON) does not run (reason above)' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "error: $(PYTHON) cannot make virtual environments." >&2; \
	  echo "What to do: apt-get install python$$v-venv" >&2; exit 1; }
	@$(PYTHON) -I src/pagestream/cli/libpython.py

$(INSTALLED): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory check-python
	@echo '[1/4] Virtual environment in $(VENV) from $(PYTHON)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo '[2/4] Dependencies (torch is large: minutes on a slow network)'
	@$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@echo '[3/4] tritonserver and its python backend, from $(PYTRITON)'
	@$(BIN)/python -m pip install $(PIP_ARGS) --no-deps $(PYTRITON)
	@echo '[4/4] CPU ops, if there is a C++ compiler'
	@$(BIN)/python -c 'import pagestream_kernels.cpu.native'
	@touch $@

serve: setup
	@$(BIN)/pagestream serve $(ARGS)

demo: setup
	@$(BIN)/pagestream demo $(ARGS)

golden: setup
	@$(BIN)/pagestream golden $(ARGS)

test: check setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m 'not long' $(ARGS)

test-long: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m long $(ARGS)

equivalence: setup
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m long -s tests/engine/test_equivalence.py $(ARGS)

kernels-interpret: $(INSTALLED)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/interpreter $(ARGS)

kernels-aot: $(INSTALLED)
	$(BIN)/python -m pytest tests/kernels/aot $(ARGS)

bench-host: $(INSTALLED)
	@$(BIN)/python benchmarks/host_cost.py $(ARGS)

bench-text: setup
	@$(BIN)/python benchmarks/text_path.py $(ARGS)

bench-cpu: setup
	@$(BIN)/python benchmarks/cpu.py $(ARGS)

bench-peers: setup
	@$(BIN)/python benchmarks/peers/peers.py $(ARGS)

bench-gpu: $(INSTALLED)
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

perf-analyzer: setup
	@$(BIN)/python benchmarks/perf_analyzer.py $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_sizes.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
