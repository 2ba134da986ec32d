# make demo shows clew at work, make test proves it; both set up what they need.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint bench images clean
SHELL := /bin/bash

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.clew-ready

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(STAMP)  ## create .venv with everything that clew and its tests need

# torch goes first and alone: the tested version must be there before anything else may ask for another one.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/clew/stats/*.[ch] src/clew/compare/*.c src/clew/capture/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

# The doctor and the test are meant to find something: their exit codes are no failure of the demo.
demo: $(STAMP)  ## a training goes NaN: clew names the cause and the line, writes a test; mended, both are fine
	rm -rf build/demo
	$(BIN)/clew run --out build/demo --name nan examples/demo_nan.py
	! $(BIN)/clew doctor build/demo/nan
	$(BIN)/clew why build/demo/nan
	$(BIN)/clew repro build/demo/nan -o build/demo/test_nan.py
	! $(BIN)/python -m pytest -q -p no:cacheprovider -c /dev/null build/demo/test_nan.py
	DEMO_FIXED=1 $(BIN)/python -m pytest -q -p no:cacheprovider -c /dev/null build/demo/test_nan.py
	$(BIN)/clew run --out build/demo --name mended examples/demo_nan.py --fixed
	$(BIN)/clew doctor build/demo/mended

test: $(STAMP)  ## run the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(STAMP)  ## ruff, mypy and the rules of who may import whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## what recording costs, against the plain loop
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.compare
	$(BIN)/python -m benchmarks.checkpoint
	$(BIN)/python -m benchmarks.doctor
	$(BIN)/python -m benchmarks.doctor_cost

images: $(STAMP)  ## draw the pictures of the documentation again
	$(BIN)/python docs/make_images.py

clean:  ## remove what building and testing left
	rm -rf build .mypy_cache .ruff_cache .hypothesis .import_linter_cache
