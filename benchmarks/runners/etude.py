"""Etude, with the settings that all share: equal networks, equal observations, equal gradients."""

from __future__ import annotations

from typing import Any

import etude
from benchmarks.progress import Finished, Progress, main
from etude.core.contracts import Fragment
from etude.planning.recipe import Recipe
from etude.rl.sac import SACConfig
from etude.training.loop import Callback, Context


class Report(Callback):
    """Tells the run's progress about episodes and steps after every iteration."""

    def __init__(self, progress: Progress, threads: int) -> None:
        """threads: that step groups side by side, each with seconds of its own."""
        self._progress, self._threads = progress, threads

    def run_start(self, context: Context) -> None:
        if self._progress.resume:
            self._progress.goes_on_from(context.clock.now.timesteps)

    def iteration_end(self, context: Context, fragments: list[Fragment]) -> None:
        seconds = sum(f.seconds["physics"] + f.seconds["environment"] for f in fragments)
        self._progress.in_environments(seconds / self._threads)
        for fragment in fragments:
            told = fragment.episodes
            success = told.get("is_success")
            for i, total in enumerate(told["return"]):
                self._progress.episode(total, None if success is None else success[i])
        try:
            self._progress.point(context.clock.now.timesteps)
        except Finished as ending:
            if str(ending) != "steps":  # a run of its full length saves itself
                raise


def recipe(progress: Progress) -> Recipe:
    """The recipe for the task, with the shared settings."""
    task = progress.task
    shared: dict[str, Any] = {
        "policy__hidden": task.hidden,
        "policy__activation": task.activation,
        "policy__critic_reads": ("state",),
    }
    chosen = etude.recipes.find(task.name).replace(**shared)
    if task.algorithm == "sac":
        return chosen.replace(
            algorithm=SACConfig(
                rollout_steps=task.rollout_steps,
                train_batches=task.train_batches,
                batch_size=task.minibatch_size,
                warmup_steps=task.warmup_steps,
                capacity=task.capacity,
                gamma=task.gamma,
                learning_rate=task.learning_rate,
                initial_alpha=task.initial_alpha,
                target_entropy=task.target_entropy,
                normalise_observations=True,
            )
        )
    return chosen.replace(
        policy__init_std=task.init_std,
        collector__num_envs=task.num_envs,
        collector__envs_per_group=task.num_envs,
        collector__threads=1,
        collector__engine_threads=2,
        algorithm__rollout_steps=task.rollout_steps,
        algorithm__minibatch_size=task.minibatch_size,
        algorithm__update_epochs=task.update_epochs,
        algorithm__learning_rate=task.learning_rate,
        algorithm__final_learning_rate=1.0,
        algorithm__gamma=task.gamma,
        algorithm__gae_lambda=task.gae_lambda,
        algorithm__clip=task.clip,
        algorithm__entropy_coef=task.entropy_coef,
        algorithm__max_grad_norm=task.max_grad_norm,
        algorithm__value_coef=1.0,  # of half a squared error
        algorithm__bound_coef=0.0,  # a term of the loss that the others do not have
    )


def run(progress: Progress, chosen: Recipe) -> dict[str, Any]:
    """Train, or resume what is in the folder, and tell the run's fingerprint."""
    folder, told = progress.out / "run", Report(progress, chosen.collector.threads)
    if progress.resume:
        finished = etude.resume(folder, callbacks=[told])
    else:
        rollout = chosen.collector.num_envs * chosen.algorithm.rollout_steps
        steps = min(progress.limit, 10**9) // rollout * rollout
        every = f"{progress.checkpoint_every} steps"
        chosen = chosen.replace(
            seed=progress.seed,
            clock__total_timesteps=max(steps, rollout),
            evaluation__every="never",
            checkpoint__every=every,
        )
        finished = etude.train(chosen, folder, callbacks=[told], console=False)
    return {"fingerprint": finished.fingerprint()}


RESUMES = "etude resume: everything, bit for bit"

if __name__ == "__main__":
    raise SystemExit(
        main(
            lambda progress: run(progress, recipe(progress)),
            package="",
            resumes=RESUMES,
            note="one batch, whose engine has two threads; logs and checkpoints are written",
        )
    )
