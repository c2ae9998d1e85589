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
	python gates/smallest.py --record=build/seconds.json || failed=1; \
	python gates/fresh.py --check || failed=1; \
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
	python gates/fresh.py

gates-smallest:  ## every gate at the size at which CI runs it; minutes
	python gates/smallest.py

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
	python gates/faults_table.py
	python gates/figures.py
	python docs/_site/gallery.py

# Kills of every method that is not among the 300s.
METHODS = reach-at-scale reach-2-threads pick-place imitate-walk amp-walk walk-go1 ppo spread sac td3 \
	episodic-ircr offline reward-only bc iql rlpd dagger

gate:  ## the measured promises at full size, one result each in gates/results; a day, on an idle machine
	python gates/rollout_speed.py
	python gates/rollout_speed.py --task imitate-walk
	python gates/rollout_speed.py --task walk-go1
	for task in HalfCheetah Hopper Walker2d Ant Humanoid; do python gates/rollout_speed.py --task $$task-v5 || exit 1; done
	python gates/gym_workers.py
	python gates/update_speed.py
	python gates/train_reach.py
	python gates/train_pick_place.py --seeds 5
	python gates/train_pick_place.py --recipe pick-place-anywhere --seeds 2
	for recipe in original sac; do python gates/train_pick_place.py --recipe pick-place-$$recipe --seeds 1 || exit 1; done
	python gates/peer_pick_place.py
	python gates/peer_off_policy.py
	python gates/peer_off_policy.py --env Hopper-v5 --steps 300000 --methods sac --warmup 10000
	for task in hopper halfcheetah walker2d ant; do python gates/train_gymnasium.py --task $$task || exit 1; done
	python gates/dashboard_cost.py
	python gates/torn_checkpoints.py --cases 10000
	python gates/fuzz.py --inputs 1000000
	python gates/damaged_data.py --cases 5000
	python gates/crash_states.py --calls 70
	python gates/fault_cases.py
	python gates/damaged_runs.py --cases 5000 --by-command-line 50
	python gates/exact_resume.py --recipe reach --kills 300
	python gates/exact_resume.py --recipe episodic --kills 300
	python gates/sweep.py
	set -e; for method in $(METHODS); do python gates/exact_resume.py --recipe $$method --kills 100; done
	python gates/same_bits.py --seeds 20
	python gates/exact_resume.py --recipe ant --kills 20
	python gates/same_bits.py --recipe ant --seeds 2 --actors 2
	python gates/not_finite.py --cases 200
	python gates/memory.py --iterations 2
	python gates/scaling.py
	python gates/train_memory.py
	python gates/train_spread.py
	python gates/train_walk.py --seeds 3
	python gates/train_walk.py --recipe walk-go1-robust --seeds 1
	python gates/train_walk.py --recipe walk-go1-rough --seeds 1
	python gates/sim_to_sim.py
	python gates/off_policy_speed.py
	python gates/reward_speed.py
	python gates/train_imitation.py
	python gates/train_imitation.py --recipe imitate-backflip --seeds 1
	python gates/train_imitation.py --recipe imitate-all --seeds 1
	python gates/train_episodic.py
	python gates/train_offline.py
	python gates/datasets.py
	python gates/train_reward_only.py
	python gates/train_reward_only.py --reads state --updates 1000
	python gates/train_reward_only.py --reads state --updates 1000 --loss unbiased
	python gates/train_reward_only.py --reads state --updates 1000 --sample 4
	python gates/train_reward_only.py --libero 3
	python gates/learning.py --recipes reach --seeds 10 --out learning-reach.json
	python gates/learning.py --recipes pick-place --seeds 5 --out learning-pick-place.json
	python gates/ranks.py --kills 20
	python gates/rank_faults.py --nans 50 --freezes 20 --kills 20
	python gates/scale.py
	python gates/ray_speed.py
	python gates/ray_faults.py --recipe reach-at-scale --kills 80 --stops 20 --removals 50
	python gates/ray_faults.py --recipe episodic --kills 30 --stops 5 --removals 5
	python gates/ray_transients.py --moments 50
	python gates/ray_head.py --strikes 20
	python gates/faults_table.py
	python gates/figures.py
