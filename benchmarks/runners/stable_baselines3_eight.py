"""stable-baselines3 with 8 environments of pick-place, one after the other in one process."""

from __future__ import annotations

from stable_baselines3.common.vec_env import DummyVecEnv

from benchmarks.progress import Progress, main
from benchmarks.runners import stable_baselines3


def train(progress: Progress) -> None:
    progress.task = stable_baselines3.with_eight(progress.task)
    stable_baselines3.train_in_torch(progress, DummyVecEnv)


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
