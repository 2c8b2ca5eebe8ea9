# What a newcomer types. `make` alone prints this list.
# Needs python3 (≥ 3.11) with venv, and make. Everything else is installed into .venv, with the versions in constraints.txt.

PYTHON ?= python3
# More words for pip, for example --extra-index-url with the address of torch's CPU builds: on a Linux machine without a GPU
# that spares some GB of CUDA packages.
PIP_FLAGS ?=
# More words for the command at hand, as in: make demo ARGS="seed=3", make test ARGS="tests/objectives -x"
ARGS ?=

BIN := .venv/bin
# An environment is as old as the hash of what it was made from; a second `make` installs nothing.
HASH := $(shell $(PYTHON) -c 'import hashlib, sys; print(hashlib.sha256(sys.version.encode() + b"".join(open(f, "rb").read() for f in ("pyproject.toml", "earnest-audit/pyproject.toml", "constraints.txt"))).hexdigest()[:16])')
BASE := .venv/.base-$(HASH)
TEST := .venv/.test-$(HASH)
DEV := .venv/.dev-$(HASH)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

# Integrations that cannot share .venv: envs/NAME.txt has all their pins, .venv-NAME is made from it (docs/adr/0002), and
# envs/repair_NAME.py, where there is one, makes the result usable and checks it. LARGE ones are for `make nightly` only.
ENVS := $(patsubst envs/%.txt,%,$(wildcard envs/*.txt))
LARGE := vllm
env-hash = $(shell $(PYTHON) -c 'import hashlib, sys; print(hashlib.sha256(sys.version.encode() + b"".join(open(f, "rb").read() for f in sys.argv[1:])).hexdigest()[:16])' envs/$(1).txt $(wildcard envs/repair_$(1).py))
stamps = $(foreach name,$(1),.venv-$(name)/.made-$(call env-hash,$(name)))
OTHERS := $(call stamps,$(filter-out $(LARGE),$(ENVS)))

# One thread each: two workers on two cores beat two threads that fight, and sums come out the same everywhere.
test test-integrations nightly vllm bench docs-tables: export OMP_NUM_THREADS := 1
# The tests start hundreds of processes: without bytecode each compiles all of earnest's modules, which takes half a second.
unexport PYTHONDONTWRITEBYTECODE
# The same versions also where pip builds a package in an environment of its own.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

# Pages are tested where there is a browser; in CI there has to be one.
BROWSER := $(if $(CI),yes,$(shell command -v chromium || command -v chromium-browser || command -v google-chrome))
FAST := not slow and not vllm and not gpu
WORKERS ?= 2
RUN = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 15

.DEFAULT_GOAL := help
.PHONY: help demo test test-integrations environments lint format nightly bench docs-tables site docs wheels pins clean vllm gpu

help:  ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-18s %s\n", $$1, $$2}'

demo: $(BASE)  ## install, then train and check an adapter on the embedded model (at most 3 minutes)
	$(BIN)/earnest run quickstart $(ARGS)

test: $(TEST)  ## install what the core's tests need, then run them (not the slow ones)
	$(RUN) -m "not integration and $(FAST)" $(ARGS)

test-integrations: $(DEV) $(OTHERS)  ## install every optional package, then run the tests that need one (not the slow ones)
	@$(if $(BROWSER),,echo "No Chromium here: the tests marked 'browser' are left out (apt-get install chromium brings it).")
	$(RUN) -m "integration and $(FAST)$(if $(BROWSER),, and not browser)" $(ARGS)

environments: $(OTHERS)  ## make the second environments only (`make test-integrations` does it, too)

lint: $(DEV)  ## ruff, its formatter, the import contracts, and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy

format: $(DEV)  ## let ruff write what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

nightly: $(DEV) $(call stamps,$(ENVS)) wheels  ## the slow tests too, more examples for each property, and the wheels
	EARNEST_HYPOTHESIS=nightly $(BIN)/python -m pytest -m "not gpu" -n $(WORKERS) --dist worksteal --durations 30 $(ARGS)

vllm: $(DEV) $(call stamps,vllm)  ## the tests against a real vLLM on the CPU (its environment has 3.5 GB)
	$(BIN)/python -m pytest -m vllm --durations 15 $(ARGS)

gpu: $(DEV)  ## the tests and benchmarks that need a GPU; writes gpu-report.json to send back
	$(BIN)/python -m scripts.gpu $(ARGS)

bench: $(DEV)  ## every benchmark, one after the other, each with its JSON in benchmarks/results
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

docs-tables: $(DEV)  ## run the command under each generated table of README and docs, and write the table anew
	$(BIN)/python -m scripts.docs.tables $(ARGS)

site: $(DEV)  ## build the documentation site into build/site; a warning or a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

docs: site  ## build the site and show it in the browser (Ctrl-C ends it)
	@echo "http://127.0.0.1:8009"
	@($(BIN)/python -m webbrowser -t http://127.0.0.1:8009 >/dev/null 2>&1 &) ; $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site 8009 2>/dev/null

wheels: $(DEV)  ## build sdists and wheels of earnest and earnest-audit into dist/, and try them in empty environments
	rm -rf dist build/wheel-env
	$(BIN)/python -m build --outdir dist earnest-audit
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m scripts.try_wheels dist

pins: $(DEV)  ## write constraints.txt from what is installed
	$(BIN)/python -m scripts.pins --write

clean:  ## remove the environment and caches (runs stay)
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis build dist src/*.egg-info earnest-audit/src/*.egg-info earnest-audit/build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"earnest needs Python 3.11 or newer, this is {sys.version}; set PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv .venv

$(BASE): | $(BIN)/python
	@echo "Installing earnest into .venv (torch is the big one; once)"
	$(INSTALL) --editable ./earnest-audit --editable .
	@touch $@

$(TEST): | $(BIN)/python
	@echo "Installing earnest and what the core's tests need into .venv (once)"
	$(INSTALL) --editable ./earnest-audit --editable '.[test]'
	@touch $(BASE) $@

$(DEV): | $(BIN)/python
	@echo "Installing earnest and all that its tests need into .venv (once)"
	$(INSTALL) --editable ./earnest-audit --editable '.[dev]'
	@touch $(BASE) $(TEST) $@

define other-environment
.venv-$(1)/.made-$(call env-hash,$(1)): envs/$(1).txt $(wildcard envs/repair_$(1).py)
	@echo "Installing what the tests of '$(1)' need into .venv-$(1) (once)"
	$(PYTHON) -m venv .venv-$(1)
	PIP_CONSTRAINT= .venv-$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --requirement envs/$(1).txt
	$(if $(wildcard envs/repair_$(1).py),PIP_CONSTRAINT= .venv-$(1)/bin/python envs/repair_$(1).py)
	@touch $$@
endef
$(foreach name,$(ENVS),$(eval $(call other-environment,$(name))))
