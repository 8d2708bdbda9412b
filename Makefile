# Needs Python 3.11 (or newer) and make; everything else goes into the virtual environment.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv

BIN := $(abspath $(VENV))/bin
INSTALLED := $(VENV)/.installed
TRAIN := $(BIN)/python recipes/digits/train.py
DEMO := demo-run
CODE := det_callbacks recipes tests noxfile.py
# Every text is checked for spelling, and the prose of PROSE for usage (tests/prose.py): add det_callbacks once it is clean.
PAGES := README.md CONTRIBUTING.md CHANGELOG.md CODE_OF_CONDUCT.md SECURITY.md
TEXTS := $(CODE) conf docs .github $(PAGES) CITATION.cff Makefile mkdocs.yml pyproject.toml
PROSE := det_callbacks docs recipes/*/README.md $(PAGES)
# That the package is for; pyproject.toml has the oldest, which lint and types are for by themselves.
NEWEST_PYTHON := 3.13

# Two tests at a time, each on one thread of torch: with a thread for each core they would mostly wait for one another.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo docs causes findings bugs pictures ops-table public wheel tag test test-versions test-slow test-soak release-check mutations lint format clean

# Record a training, verify it, then plant a fault that must be found: only exit status 1, diverged, is right there.
demo: $(INSTALLED)
	rm -rf $(DEMO)
	$(TRAIN) +determinism=record determinism.reference=$(DEMO)/reference hydra.run.dir=$(DEMO)/record
	$(TRAIN) +determinism=verify determinism.reference=$(DEMO)/reference hydra.run.dir=$(DEMO)/verify
	@status=0; set -x; \
	$(TRAIN) +determinism=verify determinism.reference=$(DEMO)/reference hydra.run.dir=$(DEMO)/planted \
	    model.perturb=net.conv2 || status=$$?; \
	{ set +x; } 2>/dev/null; \
	if [ $$status -ne 1 ]; then \
	    echo "demo: the planted fault must end with exit status 1 (diverged), and this was $$status" >&2; exit 1; \
	fi; \
	echo "demo: the planted fault was found (exit status 1); the runs are in $(DEMO)/"

# The everyday tier: 8 minutes on two cores, with lint and types.
test: lint
	$(PYTEST)

# The same tests with each supported pair of torch and Lightning, in environments of their own: some 10 minutes a pair.
# One of them: make test-versions SESSION='tests(oldest)'
test-versions: $(INSTALLED)
	$(BIN)/nox $(if $(SESSION),--session "$(SESSION)")

# Tests of several seconds or more, and the rest of grids.
test-slow: $(INSTALLED)
	$(PYTEST) -m 'slow and not soak'

# 100,000 damages, 1,050 kills, 20,000 steps, each op of torch: some two hours. Also after changes to what is written to disk.
test-soak: $(INSTALLED)
	$(PYTEST) -m soak

# Everything that has to pass before a version is tagged; docs/explanation/reliability.md has the figures of the soaks.
release-check: test test-slow test-soak test-versions wheel docs

# Breaks central lines one at a time and lists which everyday test sees each (tests/mutations.txt); some 6 minutes.
mutations: $(INSTALLED)
	$(BIN)/python tests/mutations.py

lint: $(INSTALLED)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/ruff check --select E9,F --target-version $(subst .,,py$(NEWEST_PYTHON)) $(CODE)
	$(BIN)/mypy --python-version $(NEWEST_PYTHON)
	$(BIN)/codespell $(TEXTS)
	$(BIN)/python tests/prose.py $(PROSE)

# The pages of docs/ as a site, in build/site; needs no network. With --quiet, --strict would let warnings pass.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/reference/causes.md, from the functions in det_callbacks/causes.
causes: $(INSTALLED)
	$(BIN)/python tests/rule_pages.py causes

# docs/reference/findings.md, from the files in det_callbacks/findings.
findings: $(INSTALLED)
	$(BIN)/python tests/rule_pages.py findings

# docs/bugs.md, from the READMEs in recipes/gallery.
bugs: $(INSTALLED)
	$(BIN)/python tests/bugs_page.py

# tests/public.txt and det_callbacks/schemas: what users of version 1 rely on, as it is now.
public: $(INSTALLED)
	$(BIN)/python tests/public.py

# The source distribution and, built from it, the wheel, in dist/; checks the metadata and the contents.
wheel: $(INSTALLED)
	rm -rf build dist *.egg-info
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# Fails unless the tag is that of the version: make tag TAG=v1.0.0
tag:
	grep -qxF 'version = "$(TAG:v%=%)"' pyproject.toml

# The pictures in docs/, from real runs; needs Chromium.
pictures: $(INSTALLED)
	$(BIN)/python tests/pictures.py

# docs/reference/ops-determinism.md: examines each op of torch on this device; some 10 minutes on two cores.
ops-table: $(INSTALLED)
	OMP_WAIT_POLICY=PASSIVE $(BIN)/python recipes/ops_table/run.py

format: $(INSTALLED)
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# Leaves the virtual environment where it is.
clean:
	rm -rf build dist $(DEMO) outputs multirun lightning_logs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find det_callbacks recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,recipes]'
	touch $@
