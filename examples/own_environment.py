"""Train in an environment of your own: a `gymnasium.Env`, as for any other library.

    python examples/own_environment.py [--steps 49152] [--folder runs/parking]
    cd examples && etude check own_environment:Parking-v0    # tests it against the contract

A cart learns to stop at a mark. Tasks whose rows are numpy arrays step faster (docs/your-own.md),
and so do tasks on MuJoCo (docs/robots.md).
"""

import argparse
from typing import Any

import gymnasium
import numpy as np

import etude


class Parking(gymnasium.Env[Any, Any]):
    """A cart is pushed along a line, and has to stand still at a mark."""

    observation_space = gymnasium.spaces.Box(-4.0, 4.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, tolerance: float = 0.1) -> None:
        self.tolerance = tolerance

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)  # all randomness comes from self.np_random
        self.state = np.array([self.np_random.uniform(-2, 2), 0.0])  # offset and speed
        return self.state.astype(np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        offset, speed = self.state
        speed = np.clip(0.95 * speed + 0.1 * action[0], -1, 1)
        self.state = np.array([np.clip(offset + 0.2 * speed, -4, 4), speed])
        parked = bool(abs(self.state[0]) < self.tolerance and abs(speed) < 0.1)
        reward = abs(offset) - abs(self.state[0]) + 2.0 * parked
        return self.state.astype(np.float32), reward, parked, False, {"is_success": parked}


if "Parking-v0" not in gymnasium.registry:
    gymnasium.register("Parking-v0", Parking, max_episode_steps=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=49_152)
    parser.add_argument("--folder", default="runs/parking")
    options = parser.parse_args()

    recipe = etude.recipes.ppo().replace(
        name="parking",
        env__id="own_environment:Parking-v0",  # with its module, so that a resume finds it
        env__success_key="is_success",
        clock__total_timesteps=options.steps,
    )
    run = etude.train(recipe, options.folder)
    print(f"Trained in {run.path}; {run.exactness}")  # whether its state can be saved was tried
    for tolerance in (0.1, 0.02):
        metrics = run.evaluate(episodes=50, kwargs={"tolerance": tolerance})
        print(f"Stops within {tolerance} of the mark: {metrics['eval/success_rate']:.0%} of 50")


if __name__ == "__main__":
    main()
