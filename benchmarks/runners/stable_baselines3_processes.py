"""stable-baselines3 with a process for each environment (SubprocVecEnv)."""

from __future__ import annotations

from stable_baselines3 import PPO

from benchmarks.progress import main
from benchmarks.runners import stable_baselines3
from benchmarks.runners.cleanrl_style import ACTIVATIONS
from benchmarks.tasks import TASKS

if __name__ == "__main__":
    raise SystemExit(
        main(
            lambda progress: stable_baselines3.train(
                progress,
                {"ppo": PPO},
                {"activation_fn": ACTIVATIONS[progress.task.activation]},
                processes=True,
            ),
            package="stable-baselines3",
            tasks=[task.name for task in TASKS.values() if task.env_id],
            resumes=stable_baselines3.RESUMES,
            note="SubprocVecEnv; VecNormalize",
        )
    )
