# Set-up, tests and the demo, each from a fresh clone in one command. `make` alone lists them.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Python compiles what it imports, a small part of what pip would compile.
PIP := $(BIN)/python -m pip install -q --no-compile
DEMO := $(VENV)/.demo
DOCS := $(VENV)/.docs
TESTS := $(VENV)/.tests
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal -q
OTHERS := benchmarks ecosystem examples integrations parallel test_docs.py test_gpu_tier.py tools virtual_gpu
# Where kernels run in Triton's interpreter; the nightly tests look everywhere.
INTERPRETED := backends kernels masks parallel/test_ranks.py test_attention.py test_options.py test_tree.py

.PHONY: help install quick test nightly lint docs demo demo-grpo bench bench-cpu compile-matrix test-gpu bench-gpu first-day release-check clean

help:
	@echo "make install    what tests, linters and the site need; the other commands install what each of them needs"
	@echo "make demo       train four ways (padded, unpadded, naive, packed), compare, draw a picture: demo-out/demo.png"
	@echo "make demo-grpo  train on GRPO's prompts and completions in four ways, draw a picture: demo-out/demo-grpo.png"
	@echo "make quick      a fast part of the tests: the first case of each test of make test, in under a minute"
	@echo "make test       the tests that need no GPU, without the slow ones"
	@echo "make nightly    the slow tests: every model type, library, layout and GPU; 40 minutes on two cores"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the site, guides and reference, into site/; warnings are errors"
	@echo "make bench      the compile report: registers, shared memory, spills and barriers of every kernel; compiles what has changed"
	@echo "make bench-cpu  CPU times of packing, masks, patching, attention and sdpa: rows in benchmarks/results/cpu.csv"
	@echo "make compile-matrix  the compile report under Triton 3.6 and 3.9, and docs/compile-matrix.md; compiles what has changed"
	@echo "make test-gpu   the GPU tests, with the python3 on PATH; installs nothing"
	@echo "make first-day  tests, benchmarks and tuning on a GPU, the most valuable first, 9 minutes a call: first-day/verdict.md"
	@echo "make release-check  before a release: version, changelog, archives, and installs with the oldest and newest versions"
	@echo "make bench-gpu  the GPU benchmarks, with the python3 on PATH: rows in benchmarks/results; a second run continues the first"

install: $(TESTS)

# Three environments in one folder: the demo's is small, the site's and the tests' grow from it.
# torch first and pinned: a bare requirement may bring gigabytes of CUDA libraries to a machine without a GPU.
# The demo goes without Triton, a gigabyte that only a GPU uses; torch brings it there.
$(DEMO): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) "transformers>=5.6" "numpy>=1.24" "numba>=0.61" "rich>=13" "tqdm>=4.60" "typer>=0.19" matplotlib
	$(PIP) --no-deps -e .
	touch $@

$(DOCS): $(DEMO)
	$(PIP) -e ".[docs]"
	touch $@

# With the site's tools, because tests build the site.
$(TESTS): $(DEMO)
	$(PIP) -e ".[dev,plots,training]"
	touch $@ $(DOCS)

quick: install
	$(PYTEST) tests --quick -m "not gpu and not interpreter and not slow" $(addprefix --ignore=tests/,$(OTHERS))

test: install
	$(PYTEST) tests -m "not gpu and not interpreter and not slow"
	TRITON_INTERPRET=1 $(PYTEST) $(addprefix tests/,$(INTERPRETED)) -m "interpreter and not slow"
	$(BIN)/python -m pytest -q --doctest-modules tritonpack/masks/block_diagonal.py tritonpack/packing tritonpack/parallel

nightly: install
	$(PYTEST) tests -m "slow and not gpu and not interpreter"
	TRITON_INTERPRET=1 $(PYTEST) tests -m interpreter

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS)
	$(BIN)/python docs/tools/build_site.py

demo: $(DEMO)
	$(BIN)/python -m examples.demo

demo-grpo: $(DEMO)
	$(BIN)/python -m examples.demo.grpo

bench: install
	$(BIN)/python -m benchmarks.compile_report

bench-cpu: install
	$(BIN)/python -m benchmarks.cpu

compile-matrix: install
	$(BIN)/python -m benchmarks.compile_matrix

# Kernels are compiled on all cores beside the first tests, which find theirs in Triton's cache from then on.
test-gpu:
	python3 -m benchmarks.gpu.compile_ahead >/dev/null 2>&1 & ahead=$$!; \
	python3 -m pytest tests -m gpu -q; status=$$?; kill $$ahead 2>/dev/null; exit $$status

# Exit status 3 means that the same command continues.
bench-gpu:
	python3 -m benchmarks.gpu.masks
	python3 -m benchmarks.gpu --minutes 60 || test $$? = 3

first-day:
	python3 -m benchmarks.first_day || test $$? = 3

# uv resolves the oldest and the newest versions that pyproject.toml allows; some gigabytes are downloaded.
release-check: install
	$(PIP) uv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m tools.release_check

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out bench-out first-day site .cache .matrix
