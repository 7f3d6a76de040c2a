# Everything runs in .venv, which scripts/environment.py makes on first use and then leaves alone.
#
#   make PYTHON=python3.12 …     another Python (3.11 or 3.12)
#   make TORCH_INDEX=URL …       the package index to take torch from, and nothing else

# An existing environment is kept; else the first fitting Python that is found.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(or $(wildcard .venv/bin/python),$(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
	2>/dev/null && echo $$python && break; done),python3)
endif
comma := ,
TORCH_INDEX ?=
# Clients here talk to this machine: not by way of a proxy, if the environment names one.
export no_proxy := $(if $(no_proxy),$(no_proxy)$(comma))127.0.0.1,localhost
REPOSITORY ?= model_repository
ARGS ?=
VENV := .venv/bin
GPU_PYTHON ?= $(VENV)/python

.DEFAULT_GOAL := help
.PHONY: help env env-demo lock models demo serve doctor test test-core test-all test-slow test-avx2 test-compose test-docs test-browser check docs bench soak bench-gpu test-gpu clean clean-venv

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Options: PYTHON=python3.12, TORCH_INDEX=URL, ARGS='…' (handed on), REPOSITORY=folder"

env: ## make or complete .venv (every target below does it first)
	@$(PYTHON) scripts/environment.py --torch-index "$(TORCH_INDEX)"

env-demo:
	@$(PYTHON) scripts/environment.py --part demo --torch-index "$(TORCH_INDEX)"

lock: env ## write locks/ anew, after a change of constraints.txt
	@$(VENV)/python scripts/lock.py

models: env-demo ## build the models that git does not hold (once; about a minute)
	@$(VENV)/python scripts/build_models.py

# Without the libraries for an export, the demo shows the language model alone.
demo: env-demo ## start the real server and watch a dozen requests share one batch
	@$(VENV)/python scripts/build_models.py --go-on
	@$(VENV)/python scripts/demo.py $(ARGS)

serve: env-demo $(if $(filter model_repository,$(REPOSITORY)),models) ## serve REPOSITORY until Ctrl-C
	@$(VENV)/jitney serve $(REPOSITORY) $(ARGS)

doctor: env-demo ## say what is wrong with this installation and how to repair it
	@$(VENV)/jitney doctor $(ARGS)

# However many cores: a test may start a server or an engine of several processes. On two cores the
# third worker computes while tests of the others wait for a server (a sixth faster).
WORKERS ?= 3
PYTEST := $(VENV)/python -m pytest
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ELSEWHERE := not gpu and not browser and not debian and not clients

test: env models ## the tests (seven minutes on two cores with AVX-512, some nine on slower ones)
	@$(PYTEST) $(SHARED) -m "not slow and $(ELSEWHERE)" $(ARGS)

# Neither a server nor a kernel: what the first ring's rooms promise, in plain torch.
CORE := core engine execution frontend messages sampling text test_llm.py
test-core: env ## the tests of the engine itself, without a server (two minutes)
	@$(PYTEST) $(SHARED) -m "not slow and $(ELSEWHERE)" $(ARGS) $(wildcard $(CORE:%=tests/%))

test-all: env models ## every test that needs no GPU, browser or container engine (half an hour)
	@$(PYTEST) $(SHARED) -m "$(ELSEWHERE)" $(ARGS)

test-slow: env models ## those of test-all that test leaves out
	@$(PYTEST) $(SHARED) -m "slow and $(ELSEWHERE)" $(ARGS)

test-avx2: env ## what depends on the processor, as if this one had AVX2 and nothing above
	@$(VENV)/python -m tests.avx2 $(SHARED) $(ARGS)

test-gpu: env ## the tests that need a GPU
	@$(VENV)/python -m pytest -m gpu $(ARGS)

# Beside those of tests/compose, what runs a program that this target installs.
ON_DEBIAN := $(addprefix tests/,real_server/test_caps.py server_perf/test_sweep_proxy.py \
	jobs/test_job_metrics.py)
# Not part of the tests: it needs root, Debian's packages and a container engine of its own.
test-compose: env models ## docker-compose.yml, run by a real engine (root, Debian, half an hour)
	@$(VENV)/python -m tests.compose.engine.machine
	@$(VENV)/python -m pytest tests/compose $(ARGS) tests/compose/engine $(ON_DEBIAN)

# Not part of the tests: the pages' commands use the usual ports, 8000 to 8002.
test-docs: env models ## every command of README.md and docs/, run as it stands (some twenty minutes)
	@$(VENV)/python -m pytest tests/docs $(ARGS) tests/docs/run

# Not part of the tests: it needs a browser.
test-browser: env ## the sweep's report and the documentation's site, opened in Chromium
	@$(VENV)/python -m tests.browser.install
	@$(VENV)/python -m pytest tests/browser -m browser $(ARGS)

check: env ## linter, formatter (as a check), a rule of our own, and type checker
	@$(VENV)/ruff check .
	@$(VENV)/ruff format --check .
	@$(VENV)/python scripts/tuples.py
	@$(VENV)/mypy

# Not with --quiet, which hides the warnings from --strict too.
docs: env ## docs/ as a site, in build/docs, with every link checked
	@NO_MKDOCS_2_WARNING=1 $(VENV)/python -m mkdocs build --strict

bench: env ## the benchmarks whose figures stand in docs/benchmarks.md (about an hour)
	@$(VENV)/python -m benchmarks.scheduler
	@$(VENV)/python -m benchmarks.engine
	@$(VENV)/python -m benchmarks.served
	@$(VENV)/python -m benchmarks.dynamic_batching
	@$(VENV)/python -m benchmarks.batching_modes

soak: env ## an hour of requests of every kind, the engine killed every two minutes: does anything grow?
	@$(VENV)/python -m benchmarks.soak $(ARGS)

# With the Python that has the CUDA build of torch: docs/gpu.md says what else that one needs.
bench-gpu: ## check and measure the GPU path (nine minutes): GPU_PYTHON=…
	@PYTHONPATH=backend/jitney $(GPU_PYTHON) benchmarks/gpu.py $(ARGS)

clean: ## remove caches and build outputs
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

clean-venv: ## remove .venv
	@rm -rf .venv
