.PHONY: check test test-all format gate

check:  ## lint and types
	ruff check .
	ruff format --check .
	mypy

test:  ## the fast suite
	pytest

test-all:  ## with the slow tests
	pytest -m 'slow or not slow'

format:
	ruff format .
	ruff check --fix .

gate:  ## the measured promises; takes some hours, on an idle machine
	python gates/rollout_speed.py
	python gates/update_speed.py
	python gates/train_reach.py
	python gates/train_pick_place.py --seeds 5
	python gates/train_pick_place.py --recipe pick-place-anywhere --seeds 2
	python gates/peer_pick_place.py
	python gates/dashboard_cost.py
	python gates/torn_checkpoints.py --cases 10000
	python gates/crash_states.py
	python gates/exact_resume.py --recipe reach --kills 300
	python gates/exact_resume.py --recipe pick-place --kills 100
	python gates/exact_resume.py --recipe reach-at-scale --kills 100
	python gates/exact_resume.py --recipe episodic --kills 100
	python gates/exact_resume.py --recipe reward-only --kills 100
	python gates/exact_resume.py --recipe amp-walk --kills 100
	python gates/memory.py --iterations 2
	python gates/scaling.py
	python gates/train_memory.py
	python gates/train_spread.py
	python gates/off_policy_speed.py
	python gates/reward_speed.py
	python gates/train_imitation.py
	python gates/train_episodic.py
	python gates/ranks.py --kills 10
	python gates/scale.py
	python gates/ray_speed.py
	python gates/ray_faults.py --recipe reach-at-scale
	python gates/ray_faults.py --recipe episodic
