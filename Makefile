PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
READY := .venv/.ready
PAGES := README.md CHANGELOG.md CONTRIBUTING.md LICENSE pyproject.toml docs benchmarks fa3 tests

.PHONY: demo test quick lint bench pages docs package

demo: $(READY)
	$(BIN)/fa3 demo

test: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu"

quick: lint
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not gpu and not compiles"

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.bench_forward

pages: $(READY)
	$(BIN)/python -m docs.pages.support
	$(BIN)/python -m docs.pages.performance
	$(BIN)/python -m docs.pages.headline
	$(BIN)/python -m docs.pages.gallery
	$(BIN)/python -m docs.pages.start

docs: $(READY)
	$(BIN)/pip install --quiet --editable '.[docs]'
	rm -rf build/pages && mkdir -p build/pages
	cp -r $(PAGES) build/pages
	$(BIN)/python -m docs.pages.site build/pages
	$(BIN)/zensical build --clean --strict

package: $(READY)
	.ci/package '$(TORCH)'

$(READY): pyproject.toml
	@$(PYTHON) -c "import sys; sys.version_info >= (3, 10) or sys.exit('fa3 needs Python 3.10 or newer, but \
	$(PYTHON) is %d.%d. Name another one: make demo PYTHON=python3.12' % sys.version_info[:2])"
	@echo "Installing torch and fa3 into .venv, which takes minutes the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	$(BIN)/pip install --editable '.[dev]'
	touch $@
