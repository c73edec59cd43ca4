# Every target sets up what it needs: `make test` and `make demo` work on a fresh clone with nothing but python3.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-system test-upstream test-frameworks test-cuda-build matrix test-gpu gpu-day bytecode servers check bench soak fuzz mutants audit sbom lock fmt docs recording site clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The one that elasticd is tested with, and the first with a second class for NCCL.
CUDA_TORCHES ?= $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt) 2.14.1
READY := $(VENV)/.elasticd-ready
# What exists of these is checked; examples and benchmarks are code, too.
CODE := $(wildcard elasticd agents docs tests examples benchmarks)

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# One stamp stands for "the environment holds what pyproject.toml and constraints.txt ask for". pip would compile every file,
# one after the other; most are never imported.
$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing elasticd and its tools into $(VENV) (first time: a few minutes, mostly torch)"
	@tests/pip-install $(BIN)/python --no-compile -c constraints.txt -e '.[dev,demo]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib/python3*/site-packages/torch || true
	@touch $@

demo: $(READY)  ## train a small GPT on 4 CPU workers, kill one, watch it come back; draws demo.png
	@$(BIN)/python examples/demo.py

test: $(READY)  ## everything CI runs: check, then the whole test suite
	@$(MAKE) --no-print-directory --jobs=3 check bytecode servers
	@$(BIN)/python -m pytest -q --numprocesses 4 --dist loadfile --no-loadscope-reorder

test-system: $(READY)  ## the slow tests: variants of faults, several hosts, the service under a booted systemd; needs root
	@tests/install-servers system
	@$(BIN)/python -m pytest -q -m system

test-upstream: $(READY)  ## PyTorch's own launcher and agent tests, fetched from Debian's source package, on elasticd; W='…' selects by name
	@tests/pip-install $(BIN)/python -c constraints.txt -e '.[upstream]'
	@folder=$$($(BIN)/python -m tests.upstream.sources $(VENV)/upstream) && $(BIN)/python -m tests.upstream.run "$$folder" $(W)

# "===" excludes a CPU build, whose version has "+cpu" behind it.
test-cuda-build: $(READY)  ## the CUDA builds of torch without a device: template, forks, both classes of NCCL groups, recorders; installs 5 GB each
	@for torch in $(CUDA_TORCHES); do \
	    python=$(abspath $(VENV))/cuda-$$torch/bin/python; \
	    test -x $$python || $(PYTHON) -m venv $(VENV)/cuda-$$torch; \
	    tests/pip-install $$python numpy "torch===$$torch" || exit 1; \
	    echo "torch $$torch"; ELASTICD_CUDA_PYTHON=$$python $(BIN)/python -m pytest -q -m cuda_build tests/gpu || exit 1; \
	done

# What the frameworks ask for is not what elasticd needs; torch and elasticd are those of .venv.
$(VENV)-frameworks/.ready: $(READY) $(wildcard tests/frameworks/*.txt)
	@test -x $(VENV)-frameworks/bin/python || $(BIN)/python -m venv --without-pip $(VENV)-frameworks
	@for folder in $(VENV)-frameworks/lib/python3*/site-packages; do \
	    echo "import site; site.addsitedir('$$(cd $(VENV)/$${folder#$(VENV)-frameworks/} && pwd)')" > $$folder/elasticd.pth; done
	@tests/pip-install $(VENV)-frameworks/bin/python -r tests/frameworks/requirements.txt
	@tests/pip-install $(VENV)-frameworks/bin/python --no-deps -r tests/frameworks/torchx.txt
	@touch $@

test-frameworks: $(VENV)-frameworks/.ready  ## Hugging Face Trainer, Accelerate, Lightning and torchdata themselves, killed and stopped
	@$(VENV)-frameworks/bin/python -m pytest -q -m frameworks tests/frameworks

matrix: $(READY)  ## what needs no fault timing on Python 3.10 to 3.14 and torch 2.6, 2.13 and the newest, as far as they can be had; README's table
	@$(BIN)/python -m tests.matrix

# One line says what this machine lacks.
NEEDS_GPU = $(if $(ON),:,$(BIN)/python -m tests.gpu.machine || exit 0)

test-gpu: $(READY)  ## NCCL jobs on one CUDA GPU, 8 minutes for each class that torch has; ON=cpu tries the tests themselves over gloo
	@$(NEEDS_GPU); \
	    tests/pip-install $(BIN)/python -c constraints.txt -e '.[gpu]'; \
	    ELASTICD_TEST_DEVICE=$(or $(ON),cuda) $(BIN)/python -m pytest -q -m gpu tests/gpu

gpu-day: $(READY)  ## what only a GPU can tell, 23 checks into gpu-day/report.md, 10 minutes a call; ON=fake tries the checks
	@$(NEEDS_GPU); $(BIN)/python benchmarks/gpu_day.py --on $(or $(ON),cuda)

# Four processes of pytest that find no bytecode take 17 s longer than ones that do: this one makes it, beside mypy.
bytecode: $(READY)
	@$(BIN)/python -m pytest --collect-only -q >/dev/null || true

# They come from the network, beside mypy as well.
servers: $(READY)
	@tests/install-servers

check: $(READY)  ## style, types, layers
	@$(BIN)/ruff check --quiet $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE)
	@$(BIN)/mypy
	@said=$$($(BIN)/lint-imports --no-cache) || { echo "$$said"; exit 1; }

bench: $(READY)  ## recovery time, start time and overhead, side by side with torchrun
	@$(BIN)/python benchmarks/recovery.py

soak: $(READY)  ## 200 kills in a row, every way to hang and to be slow, 200 faults of nodes, network and store, 300 of agents with an adversary; needs root; HOURS=N: faults for so long in all, continued after a stop
	@$(BIN)/python $(if $(HOURS),-m benchmarks.long_soak --hours $(HOURS),benchmarks/soak.py)

fuzz: $(READY)  ## mutated records, answers, requests, job files, evidence and whatever else comes from elsewhere, 2 minutes each; SECONDS=N, the corpus is in .fuzz
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),120)

mutants: $(READY)  ## inverted operators in pure modules and in checkpoint code, N=48 of each; which do the unit tests miss? SEED=N, W='…' selects by path
	@$(BIN)/python -m tests.mutants --number $(or $(N),48) $(if $(SEED),--seed $(SEED)) $(W)

# Tools of their own environment: what they need is not what elasticd needs.
$(VENV)-audit/.ready: Makefile
	@test -x $(VENV)-audit/bin/python || $(PYTHON) -m venv $(VENV)-audit
	@tests/pip-install $(VENV)-audit/bin/python pip-audit cyclonedx-bom pip-tools
	@touch $@

LOCK := pip-compile --quiet --generate-hashes --unsafe-package torch --strip-extras --no-header --no-annotate \
    --no-emit-index-url --no-emit-find-links --constraint constraints.txt --output-file
BUILDERS := import tomllib; print("build", *tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")
lock: $(VENV)-audit/.ready  ## rewrite deploy/*requirements.txt: every dependency but torch, and what builds the wheel, with hashes; needs the package index
	@$(VENV)-audit/bin/$(LOCK) deploy/requirements.txt pyproject.toml
	@$(PYTHON) -c '$(BUILDERS)' | $(VENV)-audit/bin/$(LOCK) deploy/build-requirements.txt -

audit: $(VENV)-audit/.ready  ## known vulnerabilities of deploy/requirements.txt (pip-audit); needs the network
	@$(VENV)-audit/bin/pip-audit --requirement deploy/requirements.txt --require-hashes --disable-pip --strict

sbom: $(READY) $(VENV)-audit/.ready  ## sbom.json: what is installed in .venv, as CycloneDX
	@$(VENV)-audit/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application --output-file sbom.json $(BIN)/python

recording: $(READY)  ## docs/demo.svg: what make demo prints, in its own time
	@$(BIN)/python examples/recording.py

fmt: $(READY)  ## format the code, fix what can be fixed
	@$(BIN)/ruff format --quiet $(CODE)
	@$(BIN)/ruff check --fix --quiet $(CODE)

docs: $(READY)  ## rewrite the generated pages under docs/
	@$(BIN)/python -m docs.generate
	@$(BIN)/python deploy/k8s/rules.py

site: $(READY)  ## the documentation as a web site, into site/; fails for a link that leads nowhere
	@tests/pip-install $(BIN)/python -c constraints.txt -e '.[site]'
	@$(BIN)/mkdocs build --strict

clean:  ## remove caches and what demo and bench wrote; the environment stays
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build site demo-run bench-results demo.png
	@find elasticd agents tests -name __pycache__ -prune -exec rm -rf {} +
