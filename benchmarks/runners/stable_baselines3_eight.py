"""stable-baselines3 with 8 environments of pick-place, one after the other in one process."""

from __future__ import annotations

from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.progress import Progress, main
from benchmarks.runners import stable_baselines3
from benchmarks.runners.cleanrl_style import ACTIVATIONS


def train(progress: Progress) -> None:
    progress.task = stable_baselines3.with_eight(progress.task)
    net = {"activation_fn": ACTIVATIONS[progress.task.activation]}
    stable_baselines3.train(progress, {"ppo": PPO}, net, DummyVecEnv)


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="stable-baselines3",
            tasks=["pick-place"],
            resumes=stable_baselines3.RESUMES,
            note="DummyVecEnv with 8 environments; VecNormalize",
        )
    )
