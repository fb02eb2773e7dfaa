# The developer's commands. `make demo` and `make test` do all the set-up that a fresh machine needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# The stamp is as new as the requirements that were installed: set-up runs again only when those change.
STAMP := $(VENV)/.requirements-installed

# Most tests wait most of the time: two processes share the files out. One shows a single test's output as it comes.
TEST_PROCESSES ?= 2

.PHONY: setup demo test test-all test-min lint format bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Bireme needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}: run make with PYTHON=/path/to/python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (PyTorch is several GB; a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	@touch $@

demo: setup
	@$(BIN)/python examples/demo.py

test: setup
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow"

test-all: setup
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

# The oldest supported PyTorch, which has no process-group hooks.
test-min:
	@$(MAKE) --no-print-directory test VENV=.venv-min CONSTRAINTS=constraints-min.txt

lint: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup
	@$(BIN)/python benchmarks/overhead.py
	@$(BIN)/python benchmarks/ddp.py

clean:
	rm -rf $(VENV) .venv-min .mypy_cache .ruff_cache .pytest_cache .hypothesis
