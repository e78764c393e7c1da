# Everything runs in a virtual environment of its own (.venv); only Python 3.11 to 3.13 and a package index are needed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --no-compile --editable ./kernels --editable
# As pip would, but on every core and without the packages' own tests. A few hold files of other Pythons, which fail.
COMPILE := $(RUN) -m compileall -qq -j 0 -x /tests/ $(VENV)/lib || true
ARGS ?=

.PHONY: help train test test-newest test-oldest test-gpu coverage check pages docs format doctor clean
help:            ## what there is
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/'

train: $(VENV)/base   ## set up, then `python train.py experiment=laptop`: a small GLA, a minute (or any other: ARGS="size=mve …")
	$(RUN) train.py $(or $(ARGS),experiment=laptop)

test: $(VENV)/test    ## set up, then every test that needs no GPU, two files at a time (ARGS="-k name" selects)
	@$(RUN) -m compileall -qq src kernels || true
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-newest: $(VENV)-newest/test ## the kernels' tests with the newest torch and Triton (about 10 minutes on two cores; the first time it downloads some 6 GB)
test-oldest: $(VENV)-oldest/test ## the kernels' tests with the oldest torch and Triton (as long)
test-newest test-oldest:
	$(<D)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/kernels $(ARGS)

test-gpu: $(VENV)/test ## the tests that need an NVIDIA GPU
	$(RUN) -m pytest -m gpu $(ARGS)

coverage: $(VENV)/test ## the tests that need no GPU, with the share of branches that they reach
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report --skip-covered

check: $(VENV)/check  ## lint, format, types and the workflow of GitHub Actions
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

pages: $(VENV)/test   ## write the tables and figures of README and docs anew from the rows in results/
	$(RUN) -m study.pages

docs: $(VENV)/docs   ## build the documentation into site/; a dead link fails (to read it: python -m http.server --directory site)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

format: $(VENV)/check ## apply the formatter and the safe lint fixes
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

doctor: $(VENV)/base  ## what runs on this machine, what does not and why
	$(RUN) scripts/doctor.py

clean:           ## remove the virtual environment and caches (runs and data stay)
	rm -rf $(VENV) $(VENV)-newest $(VENV)-oldest site .pytest_cache .ruff_cache .mypy_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "linrnn needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/base: pyproject.toml kernels/pyproject.toml | $(VENV)/bin/python
	$(INSTALL) .
	@$(COMPILE)
	@touch $@

$(VENV)/test: pyproject.toml kernels/pyproject.toml | $(VENV)/bin/python
	$(INSTALL) '.[test]'
	@$(COMPILE)
	@touch $@

# The tests also need what linrnn needs. Its own bounds are narrower, and torch wants another Triton: pip says so.
$(VENV)-newest/test: TORCH := 'torch<2.15'
$(VENV)-newest/test: TRITON := 'triton<3.10'
$(VENV)-oldest/test: TORCH := 'torch==2.11.*' 'numpy<2.4'  # with a newer numpy the interpreter of Triton 3.6 fails
$(VENV)-oldest/test: TRITON := 'triton==3.6.*'
$(VENV)-%/test: pyproject.toml kernels/pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --editable ./kernels --editable '.[test]'
	$(@D)/bin/python -m pip install --quiet --no-compile --upgrade $(TORCH)
	$(@D)/bin/python -m pip install --quiet --no-compile --upgrade --no-deps $(TRITON)
	@touch $@

$(VENV)/check: pyproject.toml kernels/pyproject.toml | $(VENV)/bin/python
	$(INSTALL) '.[check]'
	@$(COMPILE)
	@touch $(VENV)/test $@  # it has all that the tests need

$(VENV)/docs: pyproject.toml kernels/pyproject.toml | $(VENV)/bin/python
	$(INSTALL) '.[docs]'
	@touch $@
