# Everything a newcomer needs. Each target sets up what it wants first; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH ?= auto
SOURCES := pyproject.toml setup.py constraints.txt scripts/install.py $(wildcard quire/kernels/cpu/native/*)

# Tests start many processes, each of which would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# Tests share nothing but the processors, so that they run in as many processes. A file's tests stay in one, and files
# begin in the order that tests/conftest.py gives them.
PYTEST := $(BIN)/python -m pytest -n $(or $(JOBS),logical) --maxprocesses 4 --dist loadfile --no-loadscope-reorder
FAST := $(addprefix tests/,kv scheduler text agents drafting test_rooms.py test_params.py test_config.py test_refusals.py)

.PHONY: setup demo check test fuzz lint format check-install lock bench clean

setup: $(VENV)/.ready

# TORCH=cpu or TORCH=cuda chooses the build of torch, also over another one; otherwise the machine does.
ifneq ($(TORCH),auto)
.PHONY: $(VENV)/.ready $(VENV)/.can-run
endif
$(VENV)/.ready: $(SOURCES)
	@$(PYTHON) scripts/install.py --torch $(TORCH) server bench test
	@touch $(VENV)/.can-run $@

# All but the tests' packages, which are half of what there is to fetch.
$(VENV)/.can-run: $(SOURCES)
	@$(PYTHON) scripts/install.py --torch $(TORCH) server bench
	@touch $@

demo: $(VENV)/.can-run
	@$(BIN)/quire generate --chat --temperature 0 --max-tokens 64 \
		--system "You are a helpful assistant. Answer briefly." \
		"What is the chemical symbol for water?" "What is the capital of Japan?"

# For while you work: lint, types, and the tests of the rooms that know no torch.
check: setup lint
	$(PYTEST) $(FAST)

test: setup lint
	$(PYTEST)

# Longer than the second that `make test` gives each target: make fuzz TARGETS=http_body SECONDS=3600
fuzz: setup
	PYTHONPATH=.:tests $(BIN)/python -m fuzz $(TARGETS) --seconds $(or $(SECONDS),60)

lint: setup
	$(BIN)/ruff check quire benchmarks tests scripts
	$(BIN)/ruff format --check quire benchmarks tests scripts
	$(BIN)/mypy

# Resolves for other platforms and Pythons, builds the wheel and tries it. Installs nothing here.
check-install: setup
	$(BIN)/python scripts/check_install.py

# After a change of pyproject.toml's packages: uv.lock for uv, and from it constraints.txt for pip. UPGRADE=1 renews all.
lock: setup
	$(BIN)/uv lock $(if $(UPGRADE),--upgrade)
	$(BIN)/python scripts/check_install.py --write-constraints

bench: setup
	$(BIN)/python -m benchmarks.scheduler
	$(BIN)/python -m benchmarks.cpu_kernels
	$(BIN)/quire bench throughput single64 lab16 mixed64 --repeats 1 --output-json bench-results/throughput.json

format: setup
	$(BIN)/ruff check --fix quire benchmarks tests scripts
	$(BIN)/ruff format quire benchmarks tests scripts

clean:
	rm -rf build bench-results .pytest_cache .mypy_cache .ruff_cache
