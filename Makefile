# Everything a newcomer needs. Each target sets up what it wants first; a second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup demo test fuzz lint format bench clean

setup: $(VENV)/.ready

# torch is pinned in constraints.txt: without the pin pip would take the newest build with gigabytes of CUDA.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(wildcard quire/kernels/cpu/native/*)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,bench,test]'
	@touch $@

demo: setup
	@$(BIN)/quire generate --chat --temperature 0 --max-tokens 64 \
		--system "You are a helpful assistant. Answer briefly." \
		"What is the chemical symbol for water?" "Which planet is known as the Red Planet?"

test: setup lint
	$(BIN)/python -m pytest

# Longer than the second that `make test` gives each target: make fuzz TARGETS=http_body SECONDS=3600
fuzz: setup
	PYTHONPATH=.:tests $(BIN)/python -m fuzz $(TARGETS) --seconds $(or $(SECONDS),60)

lint: setup
	$(BIN)/ruff check quire tests
	$(BIN)/ruff format --check quire tests
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m quire.bench.scheduler
	$(BIN)/python -m quire.bench.cpu_kernels
	$(BIN)/quire bench throughput single64 lab16 mixed64 --repeats 1 --output-json bench-results/throughput.json

format: setup
	$(BIN)/ruff check --fix quire tests
	$(BIN)/ruff format quire tests

clean:
	rm -rf build bench-results .pytest_cache .mypy_cache .ruff_cache
