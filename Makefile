# Everything runs from .venv, made by pip alone; a second call re-uses it.
#   make demo        dataset, training on 4 MPI ranks, evaluation, report in demo/
#   make test        the suite in some ten minutes, serially and under 1, 2, 3 and 4 MPI ranks
#   make nightly     the whole suite: also tests marked nightly, each under all its numbers of ranks, and 6 and 8 ranks
#   make coverage    make test with the branch coverage of each folder; SUITE="--runs serial,2" for fewer runs
#   make quick       a part of everything in less than a minute: arithmetic, layers, two ranks, one training step
#   make test-openmpi  tests of communication, and a run that is killed and resumed, under an Open MPI of this machine
#   make bench-step  step times beside torch and JAX (installs them)
#   make claims      all that benchmarks must show, with bounds, in one run; CLAIMS="--only attention" for a part
#   make docs        the documentation as a site in site/, broken links as errors
#   make docs-pages  the tables of docs/configuration.md and docs/when_to_cut.md anew, after a change of a key or a figure
#   make dist        sdist and wheel in dist/
#   make gpu-check   everything there is to check on a GPU; PARTS=... some of it; installs nothing
#   make gpu-tools   CuPy and cuDNN for gpu-check on a machine with a package index
#   make gpu-wheels  .gpu-wheels/ for gpu-check on a machine that has a GPU and no package index
PYTHON ?= python3
VENV ?= .venv
# EXTRAS=test leaves the mpich wheel out, for a machine with an MPI of its own. With EXTRAS=mpich,test,lint,docs pip
# installs these tools with the rest, which takes less time than a call for each.
EXTRAS ?= mpich,test
TOOLS := lint docs dist oracle oracle-zoo peers nvrtc
comma := ,
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
# Empty for an environment outside of this clone that this clone has not made: it is used as it is, nothing is installed
# into it, and it is not removed.
OWN := $(if $(wildcard $(VENV)/bin/python),$(filter $(CURDIR)/%,$(abspath $(VENV)))$(filter $(CURDIR),$(shell cat "$(VENV)/.stamp-python" 2>/dev/null)),new)
$(if $(OWN),,$(info == $(VENV) was not made here: nothing is installed into it))
stamp = $(if $(OWN),$(VENV)/.stamp-$(1))

.DEFAULT_GOAL := help
.PHONY: help venv oracle oracle-zoo nvrtc peers lint-tools docs-tools docs docs-pages dist-tools dist demo quick test nightly coverage test-openmpi bench-step claims gpu-check gpu-tools gpu-wheels lint typecheck clean distclean

help:
	@sed -n 's/^#   //p' Makefile

# The first of $(PYTHON), python3.14 ... python3.10 that is new enough and can make a venv.
$(VENV)/.stamp-python:
	@for python in "$(PYTHON)" python3.14 python3.13 python3.12 python3.11 python3.10; do \
	  "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue; \
	  echo "== $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv "$(VENV)" && echo "$(CURDIR)" >$@ && exit 0; \
	  exit 1; \
	done; \
	echo "expected Python >= 3.10 with the venv module, got $$("$(PYTHON)" --version 2>&1); install one (Debian: also python3-venv) or call make PYTHON=/path/to/python3" >&2; \
	exit 1

# Installed again when the metadata changes; code is editable and needs nothing.
$(VENV)/.stamp-base: $(VENV)/.stamp-python pyproject.toml setup.py
	@echo "== installing halograd, MPI and the test tools (some minutes the first time)"
	@$(PIP) install -e ".[$(EXTRAS)]"
	@touch $@ $(addprefix $(VENV)/.stamp-,$(filter $(TOOLS),$(subst $(comma), ,$(EXTRAS))))

$(addprefix $(VENV)/.stamp-,$(TOOLS)): $(VENV)/.stamp-%: $(VENV)/.stamp-base
	@echo "== installing the extra '$*'"
	@$(PIP) install -e ".[$(EXTRAS),$*]"
	@touch $@

venv: $(call stamp,base)
oracle: $(call stamp,oracle)
oracle-zoo: $(call stamp,oracle-zoo)
nvrtc: $(call stamp,nvrtc)
peers: $(call stamp,peers)
lint-tools: $(call stamp,lint)
docs-tools: $(call stamp,docs)
dist-tools: $(call stamp,dist)

demo: venv
	@$(VENV)/bin/halograd demo --out demo

quick: venv
	@$(PY) tests/run_suite.py --quick $(SUITE)

test: venv
	@$(PY) tests/run_suite.py $(SUITE)

nightly: venv
	@$(PY) tests/run_suite.py --nightly $(SUITE)

coverage: lint-tools
	@$(PY) tests/run_suite.py --coverage $(SUITE)

test-openmpi: venv
	@$(PY) tests/run_suite.py --mpi openmpi $(SUITE)

# From the working tree, without the network. The variable silences an advertisement; --quiet would silence --strict too.
docs: docs-tools
	@$(PY) -c "import mkdocs, mkdocstrings" 2>/dev/null || { echo "expected MkDocs and mkdocstrings in $(VENV), got none; call make docs without VENV" >&2; exit 1; }
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/index.html"

docs-pages: docs-tools
	@$(PY) -m docs.generator

dist: dist-tools
	@$(PY) -m build --outdir dist .

bench-step: peers
	@$(PY) benchmarks/step.py

claims: peers
	@$(PY) benchmarks/claims.py --out claims/claims.json $(CLAIMS)

# Without .gpu-wheels/ the check itself says which packages are missing: pip, on a machine without an index, would wait.
gpu-check:
	@$(if $(wildcard .gpu-wheels),$(PYTHON),$(if $(wildcard $(PY)),$(PY),$(PYTHON))) -m halograd.gpucheck $(if $(wildcard .gpu-wheels),--wheels .gpu-wheels) $(PARTS)

gpu-tools: venv
	@$(if $(OWN),$(PIP) install -e ".[$(EXTRAS),gpu]",echo "$(VENV) stays as it is")

gpu-wheels: venv
	@$(PY) -m tests.gpu.wheels .gpu-wheels

lint: lint-tools
	@$(PY) -m ruff check .

typecheck: lint-tools
	@$(PY) -m mypy -p halograd

clean:
	@rm -rf build dist site claims .mypy_cache .ruff_cache .hypothesis demo runs *.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	@$(if $(OWN),rm -rf $(VENV),echo "$(VENV) stays")
