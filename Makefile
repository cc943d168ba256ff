# make setup | demo | test | lint | docs | test-slow | test-gpu | test-multinode | clean.   PYTHON, TORCH, DEEPSPEED choose what is installed.
PYTHON ?= python3
TORCH ?= torch==2.13.0
DEEPSPEED ?= deepspeed==0.19.8
DEMO_ARGS ?=
TEST_ARGS ?=

SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
LINT_READY := $(VENV)/.ready-lint
DOCS_READY := $(VENV)/.ready-docs
RECENT_TORCH := import torch; assert tuple(int(n) for n in torch.__version__.split('.')[:2]) >= (2, 11)
# On a machine with GPUs, too: what asks DeepSpeed is told the CPU, and what asks torch sees none. Bytecode is written,
# whatever the environment says: each process that a test starts would compile the package again, in half a second.
ON_CPU := PYTHONDONTWRITEBYTECODE= DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR="$(CURDIR)/.out/torch_extensions" PATH="$(CURDIR)/$(VENV)/bin:$$PATH"
LINTED := fp8_ds megatron_patches tests examples benchmarks setup.py docs/hooks.py docs/img/training_step.py docs/img/first_page.py

.PHONY: setup demo test test-slow test-gpu test-multinode lint format docs clean

setup: $(READY)

# A torch that the machine already has (a CUDA build, as a rule) is used, not replaced.
$(PY):
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 10), "python3 >= 3.10 is needed"'
	@if $(PYTHON) -c "$(RECENT_TORCH)" 2>/dev/null; then \
		echo "using the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

# DeepSpeed's setup imports torch, so torch comes first and DeepSpeed is built without isolation.
$(READY): pyproject.toml setup.py | $(PY)
	$(PY) -c "$(RECENT_TORCH)" 2>/dev/null || $(PY) -m pip install -q "$(TORCH)"
	$(PY) -m pip install -q "setuptools>=77" wheel ninja packaging py-cpuinfo
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(PY) -m pip install -q --no-build-isolation "$(DEEPSPEED)"
	$(PY) -m pip install -q --no-build-isolation -e ".[test]"
	@touch $@

$(LINT_READY): $(READY)
	$(PY) -m pip install -q --no-build-isolation -e ".[dev]"
	@touch $@

$(DOCS_READY): $(READY)
	$(PY) -m pip install -q --no-build-isolation -e ".[docs]"
	@touch $@

demo: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) examples/deepspeed/demo.py $(DEMO_ARGS)

test: $(READY)
	$(ON_CPU) $(PY) tests/build_op.py
	$(ON_CPU) $(PY) -m pytest -q -n 2 --max-worker-restart 0 $(TEST_ARGS)

test-slow: $(READY)
	$(ON_CPU) $(PY) -m pytest -q -rs -m "slow and not gpu" $(TEST_ARGS)

test-gpu: $(READY)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m pytest -q -rs -m gpu $(TEST_ARGS)

# Two network namespaces as hosts: root and iproute2; sshd and pdsh are installed where they are missing.
test-multinode: $(READY)
	tests/multinode/install_tools.sh
	$(ON_CPU) $(PY) -m pytest -q -rs -n 0 -m multinode tests/multinode $(TEST_ARGS)

lint: $(LINT_READY)
	$(PY) -m ruff check $(LINTED)
	$(PY) -m ruff format --check $(LINTED)
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-cache

# A broken link or anchor is an error (mkdocs.yml, docs/hooks.py). The pages are in .out/site afterwards.
docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

format: $(LINT_READY)
	$(PY) -m ruff check --fix $(LINTED)
	$(PY) -m ruff format $(LINTED)

clean:
	rm -rf $(VENV) build dist .out .pytest_cache .mypy_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
