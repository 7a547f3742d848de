# `make help` lists the targets. Every target that needs Python first brings .venv up to date.

PYTHON ?= python3
CONFIG ?= model_configs/cdrmix-core-tiny.yaml
# Extras of setup.py in .venv; CI adds mlflow, ray, slurm and wandb.
EXTRAS ?= data,dev,evaluation,faiss,gguf,lora,serve,tensorboard
# Further flags of the command that a target runs: make train ARGS='--max-steps 50'
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/set-up

# Two ranks where there are two devices (GPUs, else cores), one otherwise.
# nproc would answer with OMP_NUM_THREADS where that is set.
# AMD's driver lists its GPUs as nodes with SIMD units. Those that torch cannot use are told of when
# training starts.
AMD_NODES := /sys/class/kfd/kfd/topology/nodes/*/properties
GPUS := $(shell nvidia=$$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU'); \
	amd=$$(cat $(AMD_NODES) 2>/dev/null | grep -c '^simd_count [1-9]'); echo $$((nvidia + amd)))
NPROC ?= $(shell devices=$(GPUS); \
	[ "$$devices" -gt 0 ] || devices=$$(env -u OMP_NUM_THREADS nproc); \
	[ "$$devices" -lt 2 ] && echo 1 || echo 2)
# DeepSpeed warns three times that it finds no GPU, unless it is told.
ACCELERATOR := $(if $(filter 0,$(GPUS)),DS_ACCELERATOR=cpu)

# Test files go to three processes: one begins with the labs, which wait for half of their time. The
# few that ARGS names run in this one: starting others takes seconds.
WORKERS ?= 3
IN_PARALLEL := $(if $(filter tests/%,$(ARGS)),,--numprocesses $(WORKERS))

PRINT_FREE_PORT := 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'

# Tools that the programs below start (ninja, for one) are found without an activated environment.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup train cpt test lint format bench gpu-day faults coverage clean FORCE

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1 \t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(STAMP)  ## make .venv with the package and its development extras

train: setup  ## train cdrmix-core-tiny on the sample corpus; NPROC, CONFIG and ARGS change it
	@echo "make train: $(CONFIG) on $(NPROC) ranks; the deepspeed launcher starts them" >&2
	@$(ACCELERATOR) $(BIN)/deepspeed --num_gpus $(NPROC) --master_port $$($(BIN)/python -c $(PRINT_FREE_PORT)) \
		--log_level error launch/train.py --config $(CONFIG) $(ARGS)

cpt: setup  ## train a tiny model on with and without replay; prints what it forgets and learns
	@$(ACCELERATOR) $(BIN)/python -m tools.continue_tiny $(ARGS)

test: setup  ## run all tests; ARGS=--fast for minutes of them, ARGS='tests/unit -k name' for some
	@$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

lint: setup  ## check style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python -m tools.architecture --check

format: setup  ## rewrite the sources in the house's layout
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup  ## run the paired benchmarks of docs/benchmarks.md
	@$(BIN)/python -m tools.benchmark.run $(ARGS)

gpu-day: setup  ## measure what docs/benchmarks.md says of a GPU, and judge the predictions
	@$(BIN)/python -m tools.gpu_day.run $(ARGS)

faults: setup  ## break runs in every known way and print which ways they survive
	@$(BIN)/python -m tests.faults $(ARGS)

coverage: setup  ## run the tests and list the lines that none of them reached
	@$(BIN)/coverage run -m pytest $(ARGS)
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

clean:  ## remove .venv and caches; leaves data/ and experiments/
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .coverage*
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last and holds the checkout's path and the extras. Without it, in a moved
# checkout, or when the system's Python is gone, the environment is made anew; when only the extras
# or a file of requirements have changed, it is brought up to date in place.
HAS_VENV := $(shell grep -sqxF "$(CURDIR)" $(STAMP) && $(BIN)/python -c '' 2>/dev/null && echo yes)
HAS_EXTRAS := $(shell grep -sqxF "$(EXTRAS)" $(STAMP) && echo yes)
ifneq ($(HAS_VENV)$(HAS_EXTRAS),yesyes)
$(STAMP): FORCE
endif

$(STAMP): setup.py pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make setup: '$(PYTHON)' is not Python 3.11 or newer." \
		"Try: make setup PYTHON=python3.12" >&2; exit 2; }
	@"$(PYTHON)" -c 'import ensurepip, venv' >/dev/null 2>&1 || { \
		echo "make setup: '$(PYTHON)' cannot make virtual environments." \
		"Try: sudo apt-get install python3-venv" >&2; exit 2; }
	@echo "make setup: installing into $(VENV), once (PyTorch is a large download)" >&2
	@[ "$(HAS_VENV)" ] || "$(PYTHON)" -m venv --clear $(VENV)
	@rm -f $@
	@$(BIN)/python -m pip install $$([ -t 1 ] || echo --quiet) --disable-pip-version-check --use-pep517 \
		--no-compile --constraint constraints.txt --editable '.[$(EXTRAS)]'
	@# pip would compile 25,000 files on one core; some are no Python of this version, and stay
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || :
	@printf '%s\n' "$(CURDIR)" "$(EXTRAS)" > $@

FORCE:
