# make demo    see the effect on this machine
# make test    the default test suite on all cores (PYTEST_ARGS="-m slow" for the long tests)
# make lint    ruff and mypy
# make docs    the documentation site, in build/site; every warning is an error
# make package the wheel in dist/, tried in a new environment that has nothing else
# make bench   CPU benchmarks, small shapes; their numbers go to runs/*.json
# Each target makes .venv when it is missing: Python 3.11+ and make are all that is needed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint docs package bench clean

demo: $(READY)
	$(BIN)/hebbian compare glyphs

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist loadscope $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo 'The site is in build/site. To read and search it: $(BIN)/python -m http.server -d build/site'

package: $(READY)
	rm -rf dist build/clean
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(PYTHON) -m venv build/clean
	PIP_CONSTRAINT=constraints.txt build/clean/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	build/clean/bin/python -I tests/clean_install.py README.md

bench: $(READY)
	mkdir -p runs
	$(BIN)/python -m benchmarks.rule_overhead --json runs/rule-overhead.json
	$(BIN)/python -m benchmarks.output_layer --shapes 1,2,3 --budget 300 --json runs/output-layer.json

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11")'
	@echo 'Installing torch and the rest into $(VENV), once: some minutes without a word'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
