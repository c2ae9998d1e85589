.PHONY: check test affected fresh nightly coverage gates-smallest format gate faults dist lock site site-version

check:  ## lint, spelling, language and types
	ruff check .
	ruff format --check .
	codespell
	python tests/language.py
	mypy

test:  ## the fast suite; 3 minutes on two cores
	pytest -n 2 --dist worksteal --at-most=1

affected:  ## the tests that a change touches, by the import graph, the nearest first
	python tests/affected.py -- -n 2

# W&B's tests stand apart: its service hangs on the process that began it.
WANDB = tests/training/logs/test_wandb.py

nightly:  ## all that ten runs of CI do, and how long each part of it takes
	rm -f build/seconds.json
	failed=; \
	pytest -m '' --record=build/seconds.json $(WANDB) || failed=1; \
	pytest -n 2 --dist worksteal -m '' --record=build/seconds.json --ignore $(WANDB) || failed=1; \
	python -m gates.lib.smallest --record=build/seconds.json || failed=1; \
	python -m gates.lib.fresh --check || failed=1; \
	python tests/rotation.py build/seconds.json && [ -z "$$failed" ]

# Counting slows everything: tests of speed and start-up are left out.
coverage:  ## which statements the tests of every run of CI execute, in docs/about/coverage.md
	rm -rf build/coverage && mkdir -p build/coverage
	coverage run -m pytest -n 2 --dist worksteal -m 'not rotated' --ignore tests/test_light.py --ignore $(WANDB) || true
	coverage combine -q && coverage json -q -o build/coverage.json
	python docs/_site/coverage_page.py build/coverage.json "all tests but those that rotate"

format:
	ruff format .
	ruff check --fix .

fresh:  ## which results must be measured again, and why; minutes
	python -m gates.lib.fresh

gates-smallest:  ## every gate at the size at which CI runs it; minutes
	python -m gates.lib.smallest

dist:  ## wheels and source archives of both packages in dist/, checked
	python -m build --no-isolation --outdir dist .
	python -m build --no-isolation --outdir dist runtime
	twine check --strict dist/*

LOCKS = requirements-dev.txt requirements-cuda.txt

lock:  ## the newest versions that fit, with hashes, into requirements-dev.txt and requirements-cuda.txt; needs uv
	for lock in $(LOCKS); do grep '^#' $$lock > $$lock.new || exit 1; done
	uv pip compile -q --upgrade --generate-hashes --universal --python-version 3.11 --extra dev --extra video \
		--no-header --no-annotate --no-emit-index-url pyproject.toml > requirements.new
	awk '/^[a-z0-9]/ { cuda = /^(cuda|nvidia|triton)/ } \
		{ print >> (cuda ? "requirements-cuda.txt.new" : "requirements-dev.txt.new") }' requirements.new
	for lock in $(LOCKS); do mv $$lock.new $$lock; done
	rm requirements.new

site:  ## all pages, a reference and a search in build/site, which open without a network
	mkdocs build --strict

VERSION = $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)

site-version:  ## the pages of this version (VERSION=0.2 names another) on the local branch gh-pages, beside those of others
	mike deploy --update-aliases $(VERSION) latest
	mike set-default latest

faults:  ## docs/faults.md, docs/measured.md and the figures of all pages from what the gates have measured
	python -m gates.pages.faults_table
	python -m gates.pages.figures
	python docs/_site/gallery.py

gate:  ## the measured promises at full size, one result each in gates/results; a day, on an idle machine
	python -m gates.lib.full
	$(MAKE) faults
