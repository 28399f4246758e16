# `make demo` and `make test` work in a fresh clone: they make .venv and install the package.
# Stamp files keep a second run from installing again.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BENCH_VENV := .venv-bench
KVPRESS_VENV := .venv-kvpress
PIP := -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-triton lint format bench-env bench bench-transformers bench-llama bench-accuracy bench-policies clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.base ## fetch the default model and let it answer two questions about a text
	$(VENV)/bin/minikv pull smollm2-135m
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/.test ## run the tests, one process per core (ARGS="-k chat" chooses some, ARGS="-n 0" is one process)
	$(VENV)/bin/python -m pytest -n auto $(ARGS)

test-all: $(VENV)/.test ## the tests and those marked slow
	$(VENV)/bin/python -m pytest -m "not gpu" $(ARGS)

test-triton: $(VENV)/.triton ## the tests of the Triton kernels, interpreted, and their compilation for three GPUs
	$(VENV)/bin/python -m pytest tests/test_triton_*.py $(ARGS)
	$(VENV)/bin/python benchmarks/compile_kernels.py

lint: $(VENV)/.test ## check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.test ## rewrite the sources in the project's format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench-env: $(BENCH_VENV)/.bench ## make the benchmarks' own environment

bench: $(BENCH_VENV)/.bench ## measure against transformers (ARGS="--quick" for a short run)
	$(BENCH_VENV)/bin/python benchmarks/bench_engine.py $(ARGS)

bench-transformers: $(BENCH_VENV)/.bench ## the compiled kernels beside transformers, in turns (ARGS as above)
	$(BENCH_VENV)/bin/python benchmarks/bench_transformers.py $(ARGS)

bench-llama: $(BENCH_VENV)/.llama ## the same beside llama.cpp, which the first run compiles
	$(BENCH_VENV)/bin/python benchmarks/bench_llama_cpp.py $(ARGS)

bench-accuracy: $(BENCH_VENV)/.llama ## what rounding costs, minikv's and llama.cpp's (ARGS="--tokens 200" is quick)
	$(BENCH_VENV)/bin/python benchmarks/bench_accuracy.py --llama $(ARGS)

bench-policies: $(KVPRESS_VENV)/.kvpress ## compression policies beside kvpress (ARGS="--samples 1 --length 1024" is quick)
	$(KVPRESS_VENV)/bin/python benchmarks/bench_policies.py $(ARGS)

clean: ## remove the environments and everything built
	rm -rf $(VENV) $(BENCH_VENV) $(KVPRESS_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

%/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "minikv needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(@D)
	touch $@

KERNELS := setup.py $(wildcard minikv/kernels/cpu/*.cpp minikv/kernels/cpu/*.h)

# The library lies beside its sources and may be deleted there. The stamp names what was built: nothing without a
# compiler, where another run would build nothing either.
LIBRARY := $(shell cat $(VENV)/.base 2>/dev/null)
DELETED := $(filter-out $(wildcard $(LIBRARY)),$(LIBRARY))
$(DELETED): ;

$(VENV)/.base: pyproject.toml constraints.txt $(KERNELS) $(DELETED) $(VENV)/.created
	@echo "Installing minikv and what it needs into $(VENV); the first time takes some minutes."
	$(VENV)/bin/python $(PIP) --editable .
	ls minikv/kernels/cpu/_kernels*.so > $@ 2>/dev/null || true

$(VENV)/.test: $(VENV)/.base
	$(VENV)/bin/python $(PIP) --editable '.[test]'
	touch $@

$(VENV)/.triton: $(VENV)/.test
	@echo "Installing triton into $(VENV): about 1 GB. From then on 'make test' runs its tests too."
	$(VENV)/bin/python $(PIP) --editable '.[triton]'
	touch $@

$(BENCH_VENV)/.bench: pyproject.toml constraints.txt $(BENCH_VENV)/.created
	$(BENCH_VENV)/bin/python $(PIP) --editable '.[bench]'
	touch $@

# llama.cpp for this very processor; what it has for images is left out.
$(BENCH_VENV)/.llama: pyproject.toml constraints.txt $(BENCH_VENV)/.created
	@echo "Compiling llama.cpp into $(BENCH_VENV); this takes some minutes per core."
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
	  $(BENCH_VENV)/bin/python $(PIP) --editable '.[bench-llama]'
	touch $@

# kvpress refuses the transformers that constraints.txt names, and what goes with it.
$(KVPRESS_VENV)/.kvpress: pyproject.toml constraints.txt $(KERNELS) $(KVPRESS_VENV)/.created
	grep -vE '^(transformers|tokenizers|huggingface-hub)=' constraints.txt > $(KVPRESS_VENV)/constraints.txt
	$(KVPRESS_VENV)/bin/python $(subst constraints.txt,$(KVPRESS_VENV)/constraints.txt,$(PIP)) --editable '.[bench-kvpress]'
	touch $@

.PRECIOUS: %/.created
