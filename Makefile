# make quickstart   the whole pipeline on this machine, with a report
# make test         the test suite
# make mutants      one-line changes of the formulas, seeds, denominators and schedules: the tests must notice each
# make check        ruff, format, types
# make benchmark    how fast step 3 is beside what must be computed at least (an hour)
# Each makes .venv and installs into it when requirements.txt or setup.py changed.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
INSTALLED := $(VENV)/installed
DEV := $(VENV)/installed-dev

.PHONY: quickstart test mutants check benchmark install clean

install: $(INSTALLED)

$(INSTALLED): requirements.txt setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(DEV): $(INSTALLED) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

quickstart: $(INSTALLED)
	PATH="$(BIN):$$PATH" $(BIN)/python applications/DeepSpeed-Chat/training/quickstart/main.py --output_dir runs/quickstart $(QUICKSTART_ARGS)

test: $(DEV)
	PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup $(PYTEST_ARGS)

mutants: $(DEV)
	PATH="$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_mutants.py -m mutants -q $(PYTEST_ARGS)

check: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

benchmark: $(INSTALLED)
	$(BIN)/python applications/DeepSpeed-Chat/benchmarks/step3.py $(BENCHMARK_ARGS)

clean:
	rm -rf $(VENV) runs
