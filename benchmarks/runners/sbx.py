"""sbx: stable-baselines3's interface with PPO and SAC in JAX."""

from __future__ import annotations

from flax import linen
from sbx import PPO, SAC

from benchmarks.progress import main
from benchmarks.runners import stable_baselines3

ACTIVATIONS = {"tanh": linen.tanh, "relu": linen.relu, "elu": linen.elu}

if __name__ == "__main__":
    raise SystemExit(
        main(
            lambda progress: stable_baselines3.train(
                progress,
                {"ppo": PPO, "sac": SAC},
                {"activation_fn": ACTIVATIONS[progress.task.activation]},
            ),
            package="sbx-rl",
            resumes=stable_baselines3.RESUMES,
            note="JAX on all cores; DummyVecEnv, or one batch for Etude's tasks; VecNormalize",
        )
    )
