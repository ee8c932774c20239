PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test quick lint bench

demo: $(READY)
	$(BIN)/python -m fa3 demo

test: lint
	$(BIN)/python -m pytest -n 2 -m "not gpu"

quick: lint
	$(BIN)/python -m pytest -n 2 -m "not gpu and not compiles"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.bench_forward

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
