# Two commands for a newcomer, both self-contained given Python 3.11+ and make:
#   make demo    install into .venv, capture and analyse the bundled model family, say where the report is
#   make test    install into .venv, then lint, types, import contracts and tests
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# One BLAS thread: the tests' matrices are small, and worker processes bring their own.
export OPENBLAS_NUM_THREADS = 1
# Tests start clusters of Ray on this machine, which report nothing to anyone.
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test bench docs

demo: .venv/installed-capture
	$(BIN)/qkscope demo -o demo

test: .venv/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadgroup

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

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "qkscope needs Python 3.11 or later; say which with: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml
	@echo "installing qkscope into .venv (about a minute)"
	$(PIP) --editable .
	@touch $@

.venv/installed-capture: .venv/installed
	@echo "installing what captures need into .venv (about a minute)"
	$(PIP) torch==2.13.0  # first and exactly: a range would bring gigabytes of GPU packages
	$(PIP) --editable '.[capture]'
	@touch $@

# All at once, which is quicker than one after the other.
.venv/installed-dev: .venv/bin/python pyproject.toml
	@echo "installing qkscope and what its tests need into .venv (about two minutes)"
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev,capture,gguf,ray]'
	@touch .venv/installed .venv/installed-capture $@

.venv/installed-docs: .venv/installed-capture
	@echo "installing what builds the documentation into .venv (about half a minute)"
	$(PIP) --editable '.[docs]'
	@touch $@
