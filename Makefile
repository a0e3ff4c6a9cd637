# SPDX-License-Identifier: Apache-2.0
# Every task of the project; `make help` lists them. A machine needs python3 (3.11 or
# newer) with pip and venv, g++ and make: all else is installed into .venv* here.
#
# Settings, each given as `make demo NAME=value`:
#   PYTHON         interpreter of .venv (default: python3)
#   PYTHON_OLDEST, PYTHON_NEWEST   interpreters of `make test` (default: searched for)
#   GPU_EXTRA      cuda13, cuda12 or nothing (default: what the driver says)
#   DEMO_FLAGS, GPT_FLAGS, LLAMA_FLAGS, MOE_FLAGS, MAMBA_FLAGS, GENERATE_FLAGS
#                  flags of `make demo`, `make gpt`, `make llama`, `make moe`,
#                  `make mamba` and `make generate`, such as --help
#   FUZZ_SECONDS   how long `make fuzz` searches (default: 60); CXX is its clang++
#   ALL=1          all cases of all tests, where `make test` runs a sample
#   PYTEST_FLAGS   flags of every pytest run but the GPU ring's (default:
#                  -n 2 --dist loadgroup)
#   OFFLINE=1 WHEELS=folder   for a GPU machine that reaches no package registry: .venv
#                  gets the packages that PYTHON sees and the wheels in the folder, that
#                  of jax_cudnn from `make wheel` among them (for demo, gpt, llama,
#                  moe, generate, build and gpu)

PYTHON ?= python3
PYTHON_OLDEST ?= $(shell scripts/setup/find_python.sh 3.11 3.12 3.13)
PYTHON_NEWEST ?= $(shell scripts/setup/find_python.sh 3.13 3.12 3.14)
GPU_EXTRA ?= $(shell scripts/setup/gpu_extra.sh)
PYTEST_FLAGS ?= -n 2 --dist loadgroup
FUZZ_SECONDS ?= 60
export OFFLINE WHEELS

# The supported range of JAX, as in pyproject.toml. JAX 0.11 and later need Python 3.12.
JAX_OLDEST := 0.10.0
JAX_NEWEST := 0.12.0.1

# Tools that judge the code: pinned, because their verdicts change with their versions.
# pyright brings its own Node.js (the `nodejs` extra), so it needs nothing else.
TOOLS := ruff==0.17.5 clang-format==23.1.5 clang-tidy==23.1.4 'pyright[nodejs]==1.1.414' \
  zizmor==1.32.0 check-jsonschema==0.39.0

comma := ,
CXX_FILES = $(wildcard ffi/*/*.cc ffi/*/*.h tests/fuzz/*.cc tests/fuzz/*.h)
BUILD_FILES = pyproject.toml CMakeLists.txt $(shell find ffi cmake -type f)
PACKAGE_FILES = $(shell find jax_cudnn -type f -not -path '*/__pycache__/*' -not -name '*.so')

# Safe path: tests import the installed wheel, not the source tree that they start in,
# which has no extension. (pytest's importlib mode, in pyproject.toml, is for that too.)
# Bytecode is kept whatever the machine's settings: without it, each process of the tests
# compiles all that it imports, which takes half of its collection.
pytest = PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE= \
  PYTHONPYCACHEPREFIX=$(CURDIR)/build/pycache $(1)/bin/python -m pytest $(2)

# The folders of all families whose tests need a GPU, or the real cuDNN without one.
folders = $(wildcard tests/*/$(1))

# The rings of tests in the environment $(1), with the flags $(2), but for gpuless: what
# cuDNN plans does not depend on JAX, so it is asked once. The largest comes last, so that
# the output ends with its summary.
define rings
$(if $(GPU_EXTRA),$(call pytest,$(1),$(call folders,gpu)))
$(call pytest,$(1),$(PYTEST_FLAGS) $(2) --ignore-glob='*/gpuless' $(if $(GPU_EXTRA),--ignore-glob='*/gpu') tests)
endef

# Tests marked `sampled` have many cases. Each JAX gets another part of them, but at least
# one of each test. With ALL=1, all of them run, and the tests marked `thorough`.
sample = $(if $(ALL),,--sample $(1))

define no_newest
echo '**********************************************************************' >&2
echo '** NOT TESTED: JAX $(JAX_NEWEST), the newest supported.' >&2
echo '** It needs Python 3.12 or newer, and none that runs was found here.' >&2
echo '** Name one: make $@ PYTHON_NEWEST=/path/to/python3.13' >&2
echo '**********************************************************************' >&2
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.SUFFIXES:

##@ Use

.PHONY: help
help:  ## list the targets
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} \
	  /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: .venv/.installed  ## train a small character transformer, on the GPU if there is one
	.venv/bin/python examples/train_char_transformer.py $(DEMO_FLAGS)

.PHONY: gpt
gpt: .venv/.installed  ## train GPT-2 on all GPUs, or a tiny one on the CPU
	.venv/bin/python examples/train_gpt.py $(GPT_FLAGS)

.PHONY: llama
llama: .venv/.installed  ## train Llama-2 on all GPUs, or a tiny one on the CPU
	.venv/bin/python examples/train_llama.py $(LLAMA_FLAGS)

.PHONY: moe
moe: .venv/.installed  ## train a transformer with mixtures of experts, on GPUs or the CPU
	.venv/bin/python examples/train_moe.py $(MOE_FLAGS)

.PHONY: mamba
mamba: .venv/.installed  ## train a small state-space model, on the GPU if there is one
	.venv/bin/python examples/train_mamba.py $(MAMBA_FLAGS)

.PHONY: generate
generate: .venv/.installed  ## generate text with a cache of keys and values
	.venv/bin/python examples/generate.py $(GENERATE_FLAGS)

.PHONY: wheel
wheel:  ## build a wheel for Python 3.12 and newer, in build/wheels/release
	scripts/setup/build_wheel.sh release '$(PYTHON_NEWEST)'

.PHONY: build
build: .venv/.installed  ## install the working tree, editable, in .venv

##@ Check

# Makes the targets $(2), with $(1) beside them, whose output follows. Most of these
# keep one core or the network busy, and CI has two cores.
define beside
@mkdir -p build
@$(MAKE) --no-print-directory $(1) > build/beside.log 2>&1 & beside=$$!; \
$(MAKE) --no-print-directory $(2); failed=$$?; \
wait $$beside || failed=1; cat build/beside.log; exit $$failed
endef

# One after the other: what C++ the first one compiles, the next finds in the cache.
environments = .venv-oldest/.installed .venv-docs/.installed

.PHONY: test
test:  ## what CI checks, in less than half an hour
	$(call beside,lint,$(environments))
	$(call beside,types docs,test-newest)
	@$(MAKE) --no-print-directory test-oldest

.PHONY: checks
checks:  ## lint, types and docs
	$(call beside,lint,$(environments))
	$(call beside,types,docs)

.PHONY: test-all
test-all: tidy  ## `make test` with clang-tidy, and with all cases of every test
	$(MAKE) test ALL=1

.PHONY: lint
lint: .venv-tools/.installed  ## formatting and lint: Python, C++, workflows
	.venv-tools/bin/ruff format --check .
	.venv-tools/bin/ruff check .
	.venv-tools/bin/clang-format --dry-run -Werror $(CXX_FILES)
	.venv-tools/bin/zizmor --offline --quiet .github
	.venv-tools/bin/check-jsonschema --builtin-schema vendor.github-workflows \
	  .github/workflows/*.yml
	.venv-tools/bin/check-jsonschema --builtin-schema vendor.github-issue-forms \
	  .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml
	.venv-tools/bin/check-jsonschema --builtin-schema vendor.citation-file-format \
	  CITATION.cff

# In the folder where the tests' wheel was compiled, with the very commands that did it:
# what CMake compiles together is checked together, and in this order, the longest first.
.PHONY: tidy
tidy: .venv-tools/.installed .venv-oldest/.installed  ## clang-tidy, some minutes
	sed -nE 's#^ *"file": "(.*/Unity/.*|$(CURDIR)/ffi/.*)",?$$#\1#p' \
	  build/venv-oldest/compile_commands.json | sort | xargs -P 2 -n 1 \
	  .venv-tools/bin/clang-tidy --quiet -p build/venv-oldest

# CXX is make's own default where nobody names one, and that is no clang.
.PHONY: fuzz
fuzz:  ## what breaks the C++ readers? a minute of clang's libFuzzer; needs clang++
	CXX='$(if $(filter default,$(origin CXX)),clang++,$(CXX))' \
	  scripts/fuzz.sh '$(FUZZ_SECONDS)' '$(PYTHON)'

# Warnings are errors: of links, of the reference, and of the notebooks, which are executed
# on the CPU. They compile more than they compute, hence without XLA's optimisations.
.PHONY: docs
docs: .venv-docs/.installed  ## the documentation site, in build/docs/html
	JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 PYTHONSAFEPATH=1 \
	  .venv-docs/bin/python -m sphinx -W --keep-going --quiet --jobs 2 \
	  -d build/docs/doctrees -b html docs build/docs/html
	@echo "== built build/docs/html/index.html"

.PHONY: format
format: .venv-tools/.installed  ## rewrite the sources in the project's format
	.venv-tools/bin/ruff format .
	.venv-tools/bin/ruff check --fix .
	.venv-tools/bin/clang-format -i $(CXX_FILES)

.PHONY: types
types: .venv-tools/.installed .venv-oldest/.installed  ## pyright
	.venv-tools/bin/pyright --pythonpath .venv-oldest/bin/python

# Each program is compiled by one thread: the tests' processes keep all cores busy.
test-oldest test-newest: export XLA_FLAGS := --xla_cpu_parallel_codegen_split_count=1 $(XLA_FLAGS)

.PHONY: test-oldest
# For JAX 0.10: its XLA then compiles small programs for the CPU, of which the tests have
# thousands, in half the time. Newer ones do not know the flag, and stop.
test-oldest: export XLA_FLAGS := --xla_cpu_use_fusion_emitters=false $(XLA_FLAGS)
test-oldest: .venv-oldest/.installed gpuless  ## all rings with the oldest JAX supported
	$(call rings,.venv-oldest,$(call sample,1/24))

.PHONY: test-newest
ifneq ($(PYTHON_NEWEST),)
test-newest: .venv-newest/.installed  ## what depends on JAX, with the newest one supported
	$(call rings,.venv-newest,-m 'not once' --ignore-glob='*/gpu' $(call sample,2/24))
else
test-newest:
	@$(no_newest)
endif

.PHONY: gpuless
gpuless: .venv-oldest/.installed  ## the real cuDNN plans every graph, without a GPU
	$(call pytest,.venv-oldest,$(PYTEST_FLAGS) $(call sample,1/24) $(call folders,gpuless))

.PHONY: gpu
gpu: .venv/.installed  ## the GPU ring, with its report
	PYTHONSAFEPATH=1 PYTHONPATH=. .venv/bin/python -m scripts.gpu_report

##@ Tidy up

.PHONY: clean
clean:  ## remove all that make made, environments too
	rm -rf .venv* build dist .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Environments. Each carries a mark that is as old as its last installation.

.venv/.installed: $(BUILD_FILES)
	EDITABLE=1 scripts/setup/install.sh $(@D) '$(PYTHON)' 'test$(addprefix $(comma),$(GPU_EXTRA))'
	@touch $@

# Without a GPU, `gpuless` brings the libraries with which the real cuDNN still plans.
.venv-oldest/.installed: $(BUILD_FILES) $(PACKAGE_FILES)
	WERROR=1 scripts/setup/install.sh $(@D) '$(PYTHON_OLDEST)' 'test,$(or $(GPU_EXTRA),gpuless)' jax==$(JAX_OLDEST)
	@touch $@

.venv-newest/.installed: $(BUILD_FILES) $(PACKAGE_FILES)
	WERROR=1 scripts/setup/install.sh $(@D) '$(PYTHON_NEWEST)' 'test,$(or $(GPU_EXTRA),gpuless)' jax==$(JAX_NEWEST)
	@touch $@

# The tests' wheel, with the real cuDNN, which the notebook of plans asks.
docs_from = $(if $(PYTHON_NEWEST),newest,oldest)
docs_python = $(or $(PYTHON_NEWEST),$(PYTHON_OLDEST))
docs_wheel = build/wheels/venv-$(docs_from)/*.whl
.venv-docs/.installed: .venv-$(docs_from)/.installed
	scripts/setup/venv.sh $(@D) '$(docs_python)' --no-deps --force-reinstall $(docs_wheel)
	scripts/setup/venv.sh $(@D) '$(docs_python)' "$$(echo $(docs_wheel))[docs,gpuless]" \
	  jax==$(if $(PYTHON_NEWEST),$(JAX_NEWEST),$(JAX_OLDEST))
	@touch $@

.venv-tools/.installed: Makefile scripts/setup/venv.sh
	scripts/setup/venv.sh $(@D) '$(PYTHON)' $(TOOLS)
	@touch $@
