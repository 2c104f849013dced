# One virtual environment, made once from constraints.txt; every target uses it.
PYTHON ?= python3
VENV := .venv
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pip compiles one file at a time; compileall, below, uses every core, and torch is compiled while pip installs the rest. A
# file that cannot be compiled is no error to either. What hardly any process imports is compiled when one does.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
COMPILE := $(BIN)/python -m compileall -q -x '/tests/|/transformers/models/|/site-packages/(networkx|pip|setuptools)/'

.PHONY: quickstart quickstart-rl test test-all test-oldest check bench bench-dp bench-tp bench-cp bench-pp bench-adam bench-recompute \
	bench-offload bench-memory bench-planner bench-plan bench-search format
$(STAMP): setup.py constraints.txt megatron/kernels/backends/cpu_adam.cpp
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; give one with make PYTHON=python3.12")'
	@echo "Installing into $(VENV). This happens once; torch is large."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); exit 1)
	$(PIP) torch==$(TORCH)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(COMPILE) $(VENV)/lib/python*/site-packages/torch > /dev/null & \
	$(PIP) --quiet -c $(VENV)/constraints.txt -e '.[dev]'; installed=$$?; wait; exit $$installed
	$(COMPILE) -j 0 $(VENV)/lib > /dev/null || true
	touch $@

quickstart: $(STAMP)
	$(BIN)/python tools/quickstart.py

quickstart-rl: $(STAMP)
	$(BIN)/python tools/quickstart_rl.py

# Many tests wait for processes that start or end, so several run at a time, the tests of one file in one worker. Those
# marked "alone" or "gpu" follow one by one, collected from the files that name such a mark. Both calls run, and the
# target fails when either of them does. Byte code is kept even where the environment asks for none: hundreds of test
# processes would compile the same files again.
WORKERS ?= 3
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
AT_ONCE := --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
BY_ONE := tests/gpu $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

test: $(STAMP)
	$(PYTEST) $(AT_ONCE) -m "not slow and not alone and not gpu"; first=$$?; \
	$(PYTEST) -m "(alone or gpu) and not slow" $(BY_ONE) && exit $$first

# With the layouts and scripts that `make test` leaves out to stay short.
test-all: $(STAMP)
	$(PYTEST) $(AT_ONCE) -m "not alone and not gpu"; first=$$?; \
	$(PYTEST) -m "alone or gpu" $(BY_ONE) && exit $$first

# The unit and parallel tests under the oldest torch that setup.py takes, in an environment of its own: from the package
# index it comes with CUDA's libraries, which are several GB. PYTHON= is the interpreter here, too.
test-oldest:
	$(MAKE) VENV=.venv-oldest TORCH=$$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' setup.py) oldest-in-place

.PHONY: oldest-in-place
oldest-in-place: $(STAMP)
	$(PYTEST) $(AT_ONCE) -m "not slow and not alone and not gpu" tests/unit tests/parallel

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/preprocess_throughput.py

# These need root and iproute2: they emulate hosts on this machine.
bench-dp: $(STAMP)
	$(BIN)/python -m benchmarks.cluster.data_parallel

bench-tp: $(STAMP)
	$(BIN)/python -m benchmarks.cluster.tensor_parallel

bench-cp: $(STAMP)
	$(BIN)/python -m benchmarks.cluster.context_parallel

bench-pp: $(STAMP)
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.cluster.pipeline

# 3 GB of memory; a quiet machine.
bench-adam: $(STAMP)
	$(BIN)/python benchmarks/cpu_adam.py

bench-recompute: $(STAMP)
	$(BIN)/python -m benchmarks.recompute

bench-offload: $(STAMP)
	$(BIN)/python -m benchmarks.activation_offload
	$(BIN)/python -m benchmarks.optimizer_offload

# Planned beside measured memory, counted to the byte: any machine, however busy.
bench-memory: $(STAMP)
	$(BIN)/python -m benchmarks.memory_report

# How well the planner predicts published runs; any machine, about 10 minutes of one core.
bench-planner: $(STAMP)
	$(BIN)/python -m benchmarks.planner.published_runs

# How many layouts the search plans in full, and how long it takes; any machine.
bench-search: $(STAMP)
	$(BIN)/python -m benchmarks.planner.search

# How well the planner predicts the steps of many layouts on emulated hosts; it needs root and iproute2, an idle machine and
# about half an hour.
bench-plan: $(STAMP)
	$(BIN)/python -m benchmarks.planner.emulated
