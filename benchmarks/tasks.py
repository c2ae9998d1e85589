"""The tasks of the comparison and the settings that every peer shares on them.

Equal for every peer on a task: hidden layers and activation, steps between two updates, minibatch,
passes over a rollout (PPO) or batches per update (SAC), and so the number of gradient samples per
environment step; learning rate, discount and the other coefficients. How many environments there
are and in which processes is each library's own way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """One task with its shared settings."""

    name: str
    algorithm: str
    """Either "ppo" or "sac"."""
    target: float
    """The score that time and steps are measured to."""
    kill_steps: int
    """Length of the runs that are killed at half."""
    env_id: str = ""
    """Name in Gymnasium's registry; "" for a task of `etude.make_vec`."""
    score: str = "return"
    """Which of "return" and "success" the target is about."""
    num_envs: int = 16
    rollout_steps: int = 128
    """Steps of each environment between two updates."""
    minibatch_size: int = 256
    update_epochs: int = 10
    train_batches: int = 0
    """Batches per update, of SAC."""
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    learning_rate: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.0
    max_grad_norm: float = 0.5
    init_std: float = 1.0
    warmup_steps: int = 0
    capacity: int = 0
    initial_alpha: float = 1.0
    target_entropy: float = 0.0
    tau: float = 0.005

    @property
    def rollout(self) -> int:
        """Environment steps between two updates, of all environments together."""
        return self.num_envs * self.rollout_steps

    @property
    def samples_per_step(self) -> float:
        """Gradient samples per environment step."""
        if self.algorithm == "sac":
            return self.train_batches * self.minibatch_size / self.rollout
        return self.update_epochs

    def smallest(self) -> Task:
        """The size at which CI runs a peer: too short to learn or to be timed."""
        sizes = {"num_envs": 16, "rollout_steps": 8, "minibatch_size": 64}
        return replace(self, **sizes, update_epochs=1, train_batches=8, warmup_steps=128)


TASKS = {
    task.name: task
    for task in (
        Task("halfcheetah", "ppo", 1000.0, 300_000, "HalfCheetah-v5"),
        Task("ant", "ppo", 500.0, 300_000, "Ant-v5"),
        Task(
            "pick-place",
            "ppo",
            0.9,
            200_000,
            score="success",
            num_envs=64,
            rollout_steps=16,
            minibatch_size=256,
            update_epochs=8,
            learning_rate=1e-3,
            gamma=0.95,
            entropy_coef=0.004,
            init_std=0.6,
        ),
        Task(
            "pick-place-sac",
            "sac",
            0.9,
            40_960,
            score="success",
            num_envs=32,
            rollout_steps=8,
            minibatch_size=256,
            update_epochs=0,
            train_batches=64,
            hidden=(128, 128),
            activation="relu",
            gamma=0.95,
            warmup_steps=5_120,
            capacity=200_000,
            initial_alpha=0.02,
            target_entropy=-2.0,
        ),
        Task(
            "walk-go1",
            "ppo",
            0.9,
            1_000_000,
            score="success",
            num_envs=512,
            rollout_steps=24,
            minibatch_size=3072,
            update_epochs=5,
            hidden=(128, 128),
            activation="elu",
            learning_rate=1e-3,
            gamma=0.98,
            max_grad_norm=0.5,
            init_std=0.3,
        ),
    )
}
