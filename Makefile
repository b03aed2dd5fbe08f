# make demo | test | check: each makes .venv and installs what it needs; a second call does not install again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
URI ?=
STORE ?=

KILLS ?= 200

.PHONY: demo test check soak stores terraform format clean help
help:
	@echo "make demo   train, kill, resume on a SeaweedFS that it starts (STORE=gcs: on a fake-gcs-server; URI=s3://... or gs://...: your own bucket)"
	@echo "make test   the tests"
	@echo "make check  format, lint, types, layers"
	@echo "make soak   kill trainers, uploaders and nodes at random instants, KILLS=200 times (SEED=..., REPORT=file.json, TORCHRUN=1: under torchrun)"
	@echo "make terraform  the tests of terraform/, checkov among them"
	@echo "make stores the conformance suite over every store, and the table of it in README.md and docs/stores.md"
	@echo "make format rewrite the code in the house style"

$(BIN)/.dev: pyproject.toml constraints.txt
	@echo "== installing objckpt and its development tools into $(VENV) (once; about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(BIN)/.demo: pyproject.toml constraints.txt
	@echo "== installing objckpt and what the demo needs into $(VENV) (once; about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo]'
	@touch $@

demo: $(BIN)/.demo
	@$(BIN)/python examples/demo.py $(if $(URI),--uri $(URI)) $(if $(STORE),--store $(STORE))

test: $(BIN)/.dev
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

check: $(BIN)/.dev
	@echo "== format" && $(BIN)/ruff format --check .
	@echo "== lint" && $(BIN)/ruff check .
	@echo "== types" && $(BIN)/mypy
	@echo "== layers" && $(BIN)/lint-imports --no-logo

soak: $(BIN)/.dev
	@$(BIN)/python tests/soak.py run --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(if $(REPORT),--report $(REPORT)) $(if $(TORCHRUN),--torchrun)

.venv-checkov/.done:
	@echo "== installing checkov into .venv-checkov (once; about a minute): what it needs clashes with the development tools"
	@$(PYTHON) -m venv .venv-checkov
	@.venv-checkov/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	@touch $@

terraform: $(BIN)/.dev .venv-checkov/.done
	@$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(wildcard tests/test_terraform*.py) $(ARGS)

stores: $(BIN)/.dev
	@$(BIN)/python tests/conformance_table.py $(ARGS)

format: $(BIN)/.dev
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .venv-checkov .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
