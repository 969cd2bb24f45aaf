# A fresh machine needs Python 3.11 to 3.13, pip and make. Another interpreter: make test PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One stamp for each stage. A changed pyproject.toml brings the environment up to date; another PYTHON makes it anew.
VENV_STAMP := $(VENV)/.made-by-$(notdir $(PYTHON))
RUN_STAMP := $(VENV)/.installed
TEST_STAMP := $(VENV)/.installed-test

.PHONY: demo test check clean

demo: $(RUN_STAMP)
	$(BIN)/python -m minieagle.cli demo

test: $(TEST_STAMP)
	$(BIN)/python -m pytest

check: $(TEST_STAMP)
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pyright --pythonpath $(BIN)/python

# dist/ is source: it is not in this list, and must not be.
clean:
	rm -rf $(VENV) build minieagle.egg-info .pytest_cache .ruff_cache .hypothesis

$(VENV_STAMP):
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(RUN_STAMP): pyproject.toml $(VENV_STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --editable .
	touch $@

$(TEST_STAMP): $(RUN_STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --editable ".[test]"
	touch $@
