# Every target works on a fresh machine: what it needs is installed into .venv first, again only when pyproject.toml
# has changed.
PYTHON ?= python3
VENV ?= .venv
# The oldest Python that is supported, also one that pyenv has without showing it; else the one that there is.
PYTHON_LOWEST ?= $(shell python3.10 -c 'import sys; print(sys.executable)' 2>/dev/null || \
	ls "$$(pyenv prefix 3.10 2>/dev/null)/bin/python" 2>/dev/null || command -v $(PYTHON))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_DOCS := $(VENV)/.installed-docs
INSTALLED_LOWEST := .venv-lowest/.installed
INSTALLED_ECOSYSTEM := .venv-ecosystem/.installed
INSTALLED_FLOWER := .venv-flower/.installed

.DEFAULT_GOAL := help
.PHONY: help install install-dev quickstart test test-all test-pairs test-lowest test-ecosystem test-flower test-faults test-package lint format docs package bench \
	bench-data bench-network bench-scale bench-peers

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED) ## make .venv and install the package

install-dev: $(INSTALLED_DEV) ## install what tests and checks need as well

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
		"Expected Python 3.10 or newer, got %d.%d: choose one with `make install PYTHON=python3.12`." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e .
	@touch $@

$(INSTALLED_DEV): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e ".[dev,dashboard]"
	@touch $@ $(INSTALLED)

$(INSTALLED_DOCS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -e ".[docs]"
	@touch $@ $(INSTALLED)

$(INSTALLED_LOWEST): pyproject.toml tests/lowest.txt
	$(PYTHON_LOWEST) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install -q -c tests/lowest.txt -e ".[dev]"
	@touch $@

# They see the packages of .venv and install what their extra adds, so that torch, gigabytes, is there once.
$(INSTALLED_ECOSYSTEM) $(INSTALLED_FLOWER): .venv-%/.installed: pyproject.toml | $(INSTALLED_DEV)
	$(BIN)/python -m venv .venv-$*
	for python in $(BIN)/python .venv-$*/bin/python; do $$python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; done \
		| { read -r beside; read -r own; echo "$$beside" > "$$own/beside.pth"; }
	.venv-$*/bin/python -m pip install -q -e ".[dev,$*]"
	@touch $@

quickstart: $(INSTALLED) ## compare FedAvg and GMA on handwritten digits over 3 seeds (a minute)
	@$(BIN)/lightning-fed study configs/studies/quickstart.yaml --jobs 2 --output runs
	@echo
	@$(BIN)/lightning-fed report --study configs/studies/quickstart.yaml runs

# Files stay whole: tests of one file share runs. With one process: make test PARALLEL=
PARALLEL ?= -n 2 --dist loadfile

test: $(INSTALLED_DEV) ## run the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow" $(PARALLEL)

test-all: $(INSTALLED_DEV) ## run all tests, but for pairs of parts that never see each other
	$(BIN)/python -m pytest -m "not pairs" $(PARALLEL)

test-pairs: $(INSTALLED_DEV) ## run these: any two parts together, in one process and in two (half an hour)
	$(BIN)/python -m pytest -m pairs $(PARALLEL)

# What is run with the lowest versions: everything, or fewer folders.
LOWEST ?= tests

test-lowest: $(INSTALLED_LOWEST) ## run the tests with the lowest torch, Lightning, jsonargparse and wandb allowed (with Python 3.10 if it is there)
	.venv-lowest/bin/python -m pytest -m "not slow" --ignore tests/docs $(PARALLEL) $(LOWEST)

test-ecosystem: $(INSTALLED_ECOSYSTEM) ## train modules, optimizers and data of other packages (installs them into .venv-ecosystem)
	.venv-ecosystem/bin/python -m pytest -m "" -k "ecosystem or foundation or lora" tests/ecosystem \
		tests/docs/test_pages.py tests/end_to_end/test_configs.py

# With Python 3.11 or newer. Killed processes and TLS too, some minutes more: make test-flower FLOWER='-m ""'
FLOWER ?=

test-flower: $(INSTALLED_FLOWER) ## train over the processes of Flower on this machine (installs it into .venv-flower)
	.venv-flower/bin/python -m pytest tests/flower $(FLOWER)

# What a campaign is given: make test-faults FAULTS="--only configs --trials 500 --write-docs"
FAULTS ?=

test-faults: $(INSTALLED_DEV) ## kill, damage, fill the disk, mutate configs and stop processes, and count what is lost
	$(BIN)/python -m tests.faults $(FAULTS)

lint: $(INSTALLED_DEV) ## check style, format, types, the layers of imports and the size of the rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.budget
	$(BIN)/python -m pytest -q tests/test_rooms.py

format: $(INSTALLED_DEV) ## rewrite the code as `make lint` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_DOCS) ## build the documentation into site/
	$(BIN)/mkdocs build --strict

# In an environment of its own, so that what is built depends on nothing of a developer's.
package: ## build the sdist and the wheel into dist/, and check them
	$(PYTHON) -m venv .venv-package
	.venv-package/bin/python -m pip install -q "build>=1.2" "twine>=6.0"
	rm -rf dist
	.venv-package/bin/python -m build --outdir dist .
	.venv-package/bin/python -m twine check --strict dist/*
	.venv-package/bin/python -c 'import sys, zipfile; \
		names = zipfile.ZipFile(sys.argv[1]).namelist(); \
		wanted = {"lightning_fed/py.typed", "lightning_fed/configs/quickstart.yaml"}; \
		sys.exit(sorted(wanted - set(names)) or [n for n in names if n.startswith(("tests", "benchmarks", "docs"))] or 0)' dist/*.whl

# Where the wheel is tried: those of them that are here.
PYTHONS ?= 3.10 3.11 3.12 3.13

test-package: ## install the wheel of `make package` on each Python that is here (3.10 to 3.13), and train with it outside of the checkout
	@for version in $(PYTHONS); do \
		python=$$(ls "$$(pyenv prefix $$version 2>/dev/null)/bin/python" 2>/dev/null || command -v python$$version) || \
			{ echo "Python $$version is not here."; continue; }; \
		rm -rf .venv-wheel && "$$python" -m venv .venv-wheel && .venv-wheel/bin/python -m pip install -q dist/*.whl && \
		( bin="$$PWD/.venv-wheel/bin" && cd "$$(mktemp -d)" && "$$bin/lightning-fed" configs > configs.txt && \
			"$$bin/lightning-fed" fit --config quickstart --trainer.max_rounds 2 --trainer.name wheel && \
			"$$bin/lightning-fed" report runs/wheel ) || exit 1; \
		echo "The wheel works on Python $$version."; \
	done; rm -rf .venv-wheel

# What a benchmark is given: make bench BENCH="--rows A-sequential --write-docs"
BENCH ?=

bench: $(INSTALLED) ## time rounds against a plain PyTorch loop, and measure memory and start
	$(BIN)/python -m benchmarks.run $(BENCH)

bench-scale: $(INSTALLED) ## time rounds with up to a million clients
	$(BIN)/python -m benchmarks.scale $(BENCH)

bench-network: $(INSTALLED_FLOWER) ## time rounds over nodes, in this process and by Flower
	.venv-flower/bin/python -m benchmarks.network $(BENCH)

bench-data: $(INSTALLED) ## time a client's batches against indexing, and the partitioners
	$(BIN)/python -m benchmarks.data --repeats 7 --partition-repeats 2

# In an environment of their own, as they ask for other versions of some packages.
bench-peers: ## time other frameworks on the same work (installs them into .venv-peers)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install -e .
	.venv-peers/bin/python -m benchmarks.peers --install
	.venv-peers/bin/python -m benchmarks.peers $(BENCH)
