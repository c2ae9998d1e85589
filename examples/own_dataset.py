"""Learn from demonstrations of your own: arrays become a dataset, and a policy imitates it.

    python examples/own_dataset.py [--episodes 40] [--folder runs/own-dataset]

The arrays are written in robomimic's layout, which takes h5py and no other package. Files that you
have already (robomimic, LIBERO, Minari, LeRobot v3) are imported in the same way.
"""

import argparse
from pathlib import Path

import gymnasium
import h5py
import numpy as np

import etude

TASK = "MountainCarContinuous-v0"


def demonstrate(path: Path, episodes: int) -> None:
    """Write episodes of a car that gains speed by accelerating the way it moves."""
    env, rng = gymnasium.make(TASK), np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for number in range(episodes):
            obs, over, steps = env.reset(seed=number)[0], False, []
            while not over:
                action = np.clip([np.sign(obs[1]) + rng.normal(0, 0.1)], -1, 1).astype(np.float32)
                following, reward, terminated, truncated, _ = env.step(action)
                over = terminated or truncated
                steps.append((obs, action, np.float32(reward), over, following))
                obs = following
            names = ("obs/state", "actions", "rewards", "dones", "next_obs/state")
            for name, array in zip(names, zip(*steps, strict=True), strict=True):
                file[f"data/demo_{number}/{name}"] = np.array(array)  # [steps, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("runs/own-dataset"))
    options = parser.parse_args()

    options.folder.mkdir(parents=True)
    file, dataset = options.folder / "climb the hill.hdf5", options.folder / "dataset"
    demonstrate(file, options.episodes)
    etude.import_dataset([file], dataset)
    print(f"Imported {options.episodes} episodes: `etude data inspect {dataset}` shows them")

    # Behaviour cloning, evaluated in the task itself.
    evaluation = {"episodes": 20, "num_envs": 20, "envs_per_group": 20}
    recipe = etude.recipes.bc().replace(
        name="own-dataset",
        env__id=TASK,
        algorithm__dataset=str(dataset),
        clock__epochs=1,
        **{f"evaluation__{name}": value for name, value in evaluation.items()},
    )
    run = etude.train(recipe, options.folder / "run")
    metrics = run.evaluate(episodes=20)
    print(f"20 fresh episodes: mean return {metrics['eval/mean_reward']:.1f}; 90 solves the task")


if __name__ == "__main__":
    main()
