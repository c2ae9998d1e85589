"""Drives an exported policy in plain MuJoCo, with another integrator and half the time step.

    etude export RUN --to DIR
    python drive.py DIR --episodes 100
    python drive.py DIR --realtime 10    # one loop at the policy's rate, deadlines counted

DIR is an export of walk-go1, pick-place, or of a policy that tracks a motion. Nothing of Etude is
imported but its runtime.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mujoco
import numpy as np

from etude_runtime import ContractError, FixedRate, Policy
from placing import Placing
from tracking import Tracking
from walking import Walking

DRIVERS = {
    "joint_targets": (Walking, "euler"),
    "kuka_hand": (Placing, "implicitfast"),
    "kuka_hand_turn": (Placing, "implicitfast"),
}
"""By the kind of action: the robot, and another integrator than training's. Explicit ones diverge
on the arm, whose servos are stiff."""


Driven = Walking | Placing | Tracking


def make(folder: Path, share: float = 0.5, integrator: str | None = None) -> Driven:
    """A robot in its scene, simulated with a share of the time step of training."""
    policy = Policy.load(folder)
    kind = policy.document.get("action", {}).get("kind")
    if kind not in DRIVERS:
        raise ContractError(f"There is no example that drives {kind}: it is one of {[*DRIVERS]}.")
    model = mujoco.MjModel.from_xml_path(str(folder / "scene.xml"))
    model.opt.timestep = policy.document["control"]["timestep"] * share
    known = {name[6:].lower(): value for name, value in mujoco.mjtIntegrator.__members__.items()}
    driver, default = DRIVERS[kind]
    if "motion" in policy.document:
        driver, default = Tracking, "implicitfast"
    wanted = integrator or default
    if wanted not in known:
        raise ContractError(f"There is no integrator {wanted}: it is one of {[*known]}.")
    model.opt.integrator = known[wanted]
    return driver(policy, model)


def success_rate(robot: Driven, episodes: int, seed: int) -> float:
    """Of episodes with random starts."""
    return float(
        np.mean([robot.episode(np.random.default_rng([seed, i])) for i in range(episodes)])
    )


def realtime(robot: Driven, seconds: float, seed: int) -> str:
    """Sense, act and simulate at the policy's rate; what became of the deadlines."""
    rng = np.random.default_rng(seed)
    robot.reset(rng)
    rate = FixedRate(robot.period, round(seconds / robot.period))
    for _ in rate:
        ended = robot.control(rng) if isinstance(robot, Walking) else robot.control()
        if ended or robot.step >= robot.max_steps:
            robot.reset(rng)
    return str(rate.timing)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="what `etude export` wrote")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.5, help="of training's time step")
    parser.add_argument(
        "--integrator", choices=("discrete", "euler", "implicit", "implicitfast", "rk4")
    )
    parser.add_argument("--disturb", action="store_true", help="noise and delays of training")
    parser.add_argument("--realtime", type=float, metavar="SECONDS", help="one loop, timed")
    options = parser.parse_args(arguments)
    try:
        robot = make(options.folder, options.share, options.integrator)
        if options.disturb:
            robot.policy.disturb(np.random.default_rng(options.seed))
        if options.realtime:
            print(realtime(robot, options.realtime, options.seed))
            return 0
        rate = success_rate(robot, options.episodes, options.seed)
    except ContractError as error:
        print(error, file=sys.stderr)
        return 1
    step = f"{robot.model.opt.timestep * 1e3:g} ms"
    print(f"success {rate:.1%} of {options.episodes} episodes, time step {step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
