# Every target makes the virtual environment it needs; `make demo` and `make test` are all a newcomer needs.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test lint types schema docs bench requirements format clean

help:
	@echo "make demo          start a server, fine-tune the embedded model, sample before and after"
	@echo "make test          everything: lint, types, and all tests"
	@echo "make lint types    one check each"
	@echo "make schema        write the generated reference pages"
	@echo "make docs          build the documentation into site/, and run what it says"
	@echo "make bench         benchmarks, as ratios against the official package"
	@echo "make requirements  every requirement with the tests that cite it"

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tinsmith needs Python 3.11 or later; set PYTHON=…")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all]' --group test
	@touch $@

demo: $(STAMP)
	$(BIN)/python tools/demo.py

test: lint types $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls --allow-any-generics \
		$(filter-out %/use_existing_tinker_code.py,$(wildcard examples/*.py))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(STAMP)
	@for tool in tools/write_*.py; do $(BIN)/python $$tool || exit 1; done

docs: $(STAMP)
	$(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest tests/docs tests/architecture/test_generated_files.py -q

bench: $(STAMP)
	$(BIN)/python benchmarks/foundation.py

requirements: $(STAMP)
	$(BIN)/python tools/requirements.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
