# Needs Python >= 3.10 and make. Everything is installed into a virtual environment of its own.
PYTHON ?= python3
VENV ?= .venv
# Installed where the environment has no torch yet.
TORCH ?= torch==2.13.0
# The CUDA kernels are built where there is a GPU and nvcc, for that GPU; setup.py says what else it takes.
FASTMAX_CUDA_ARCHS ?= native
# Tests run in so many processes; 0: in one, without workers.
TEST_JOBS ?= $(shell $(PYTHON) -c "import os; n = min(os.cpu_count() or 1, 4); print(n if n > 1 else 0)")

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint docs bench notebooks wheel clean

demo: $(READY)  ## train the character model, then check the custom gradient
	$(BIN)/python examples/train_char_lm.py
	$(BIN)/python -m fastmax.testing.verify

test: $(READY)  ## all tests; those that need a GPU are left out without one
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the site, in build/site; a broken link or reference is an error
	$(BIN)/python -m sphinx -W --keep-going -E -q -b html -c docs -d build/doctrees . build/site

bench: $(READY)  ## speed and memory on the CPU, against PyTorch's softmax attention
	$(BIN)/python -m benchmarks.run cpu
	$(BIN)/python -m benchmarks.run memory

notebooks: $(READY)  ## execute the notebooks and store them with their outputs
	$(BIN)/python examples/notebooks/execute.py

$(READY): pyproject.toml setup.py $(shell find csrc -type f)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install "setuptools>=77" ninja
	FASTMAX_CUDA_ARCHS="$(FASTMAX_CUDA_ARCHS)" $(BIN)/python -m pip install --no-build-isolation -e ".[docs,examples,lint,test,transformers]"
	touch $@

wheel: $(READY)  ## one wheel for every Python, in dist; with nvcc it holds the kernels for all architectures
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist *.egg-info
