"""stable-baselines3 with a process for each environment (SubprocVecEnv)."""

from __future__ import annotations

from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.progress import Progress, main
from benchmarks.runners import stable_baselines3
from benchmarks.tasks import TASKS

EIGHT = "pick-place"
"""The task that it has 8 environments of."""


def train(progress: Progress) -> None:
    if progress.task.name == EIGHT:
        progress.task = stable_baselines3.with_eight(progress.task)
    stable_baselines3.train_in_torch(progress, SubprocVecEnv)


if __name__ == "__main__":
    raise SystemExit(
        main(
            train,
            package="stable-baselines3",
            tasks=[task.name for task in TASKS.values() if task.env_id or task.name == EIGHT],
            resumes=stable_baselines3.RESUMES,
            note="SubprocVecEnv, 8 processes for pick-place, 16 for the others; VecNormalize",
        )
    )
