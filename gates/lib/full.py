"""All gates at full size, one result of each call in gates/results; a day, on an idle machine.

    python -m gates.lib.full [--only exact_resume scale] [--list]

`GATES` lists every gate: its module and the arguments of its calls at full size. A call that fails
does not end those after it.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from typing import NamedTuple

from etude.core.catalogue import TUNED
from gates import ROOT
from gates.pages.faults_table import METHODS

BESIDE_SB3 = ("hopper", "halfcheetah", "walker2d", "ant")
"""Recipes for Gymnasium's environments that are trained beside stable-baselines3."""
ALONE = tuple(
    recipe
    for recipe in (place.partition(":")[2] for place in TUNED.built_in().values())
    if recipe not in BESIDE_SB3
)
"""The other recipes that are tuned for an environment."""


class Entry(NamedTuple):
    """A gate: its module below `gates`, and the arguments of each call at full size."""

    module: str
    calls: tuple[str, ...] = ("",)
    smallest: tuple[str, ...] = ()
    """Arguments beside --smallest."""

    def commands(self) -> list[list[str]]:
        return [["-m", f"gates.{self.module}", *shlex.split(call)] for call in self.calls]


def train(*recipes: str) -> Entry:
    """A gate of learn/train.py."""
    return Entry("learn.train", recipes, recipes[:1])


REWARD = "--reads state --updates 1000"
GATES = {
    "rollout_speed": Entry(
        "speed.rollout_speed",
        (
            *("", "--task imitate-walk", "--task walk-go1"),
            *(
                f"--task {task}-v5"
                for task in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")
            ),
        ),
    ),
    "gym_workers": Entry("speed.gym_workers"),
    "update_speed": Entry("speed.update_speed"),
    "train_reach": train("reach", "seek-pictures"),
    "train_return": train(*ALONE),
    "train_pick_place": train(
        "pick-place", "pick-place-anywhere", "pick-place-original", "pick-place-sac"
    ),
    "peer_pick_place": Entry("speed.peer_pick_place"),
    "peer_off_policy": Entry(
        "learn.peer_off_policy",
        ("", "--env Hopper-v5 --steps 300000 --methods sac --warmup 10000"),
    ),
    "train_gymnasium": Entry(
        "learn.train_gymnasium",
        tuple(f"--task {task}" for task in BESIDE_SB3),
    ),
    "foreign_robots": Entry("learn.foreign_robots", ("--download",)),
    "dashboard_cost": Entry("speed.dashboard_cost"),
    "torn_checkpoints": Entry("faults.torn_checkpoints", ("--cases 10000",)),
    "fuzz": Entry("faults.fuzz", ("--inputs 1000000",)),
    "damaged_data": Entry("faults.damaged_data", ("--cases 5000",)),
    "crash_states": Entry("faults.crash_states", ("--calls 70",)),
    "fault_cases": Entry("faults.fault_cases"),
    "damaged_runs": Entry("faults.damaged_runs", ("--cases 5000 --by-command-line 50",)),
    "exact_resume": Entry(
        "exact.exact_resume",
        (
            *("--recipe reach --kills 300", "--recipe episodic --kills 300"),
            *(f"--recipe {method} --kills 100" for method in METHODS),
            "--recipe ant --kills 20",
        ),
    ),
    "sweep": Entry("exact.sweep"),
    "moments": Entry("exact.moments"),
    "planted": Entry("exact.planted"),
    "same_bits": Entry("exact.same_bits", ("--seeds 20", "--recipe ant --seeds 2 --actors 2")),
    "not_finite": Entry("faults.not_finite", ("--cases 200",)),
    "memory": Entry("speed.memory", ("--iterations 2",)),
    "scaling": Entry("speed.scaling"),
    "train_memory": train("reach-memory"),
    "train_spread": train("spread"),
    "train_walk": train("walk-go1", "walk-go1-robust", "walk-go1-rough"),
    "sim_to_sim": Entry("learn.sim_to_sim"),
    "off_policy_speed": Entry("speed.off_policy_speed"),
    "reward_speed": Entry("speed.reward_speed"),
    "train_imitation": train("imitate-walk", "imitate-backflip", "imitate-all", "amp-walk"),
    "train_demonstrations": Entry(
        "learn.train_demonstrations",
        tuple(f"--part {part}" for part in ("states", "pictures", "rlpd", "student")),
    ),
    "train_episodic": Entry("learn.train_episodic"),
    "train_offline": Entry("learn.train_offline"),
    "datasets": Entry("speed.datasets"),
    "train_reward_only": Entry(
        "learn.train_reward_only",
        ("", REWARD, f"{REWARD} --loss unbiased", f"{REWARD} --sample 4", "--libero 3"),
    ),
    "learning": Entry(
        "learn.learning",
        (
            "--recipes reach --seeds 10 --out learning-reach.json",
            "--recipes pick-place --seeds 5 --out learning-pick-place.json",
        ),
    ),
    "ranks": Entry("exact.ranks", ("--kills 20",)),
    "rank_faults": Entry("faults.rank_faults", ("--nans 50 --freezes 20 --kills 20",)),
    "scale": Entry("speed.scale"),
    "ray_speed": Entry("speed.ray_speed"),
    "ray_faults": Entry(
        "faults.ray_faults",
        (
            "--recipe reach-at-scale --kills 80 --stops 20 --removals 50",
            "--recipe episodic --kills 30 --stops 5 --removals 5",
        ),
    ),
    "ray_transients": Entry("faults.ray_transients", ("--moments 50",)),
    "preemptions": Entry("faults.preemptions", ("--preemptions 200",)),
    "ray_head": Entry("faults.ray_head", ("--strikes 20",)),
}
"""All gates by the names of their results, in the order in which `make gate` runs them."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=GATES, default=list(GATES), metavar="GATE")
    parser.add_argument("--list", action="store_true", help="print the commands and exit")
    options = parser.parse_args(arguments)
    failed = []
    for command in (each for name in options.only for each in GATES[name].commands()):
        shown = shlex.join(["python", *command])
        print(shown, flush=True)
        if not options.list and subprocess.run([sys.executable, *command], cwd=ROOT).returncode:
            failed.append(shown)
    print("".join(f"not passed: {command}\n" for command in failed), end="")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
