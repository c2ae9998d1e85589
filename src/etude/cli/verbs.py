"""Verbs of a program, found by name; nothing of a command is imported before it is used."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from importlib import import_module

from etude.core.errors import UsageError
from etude.core.progress import waiting

Verbs = dict[str, Callable[[list[str]], int | None]]
"""What each verb of a program does with the arguments after it."""
HELP_ALL = "--help-all"
HELP = {"-h", "--help", HELP_ALL}
OFTEN = {
    "env.id": "a Gymnasium environment, such as HalfCheetah-v5 (with the recipe ppo or sac)",
    "env.task": "a task of your own: module:Class or file.py:Class",
    "seed": "where all randomness of the run comes from",
    "start-from": "a run, checkpoint or policy to start from; --from is short for it",
    "clock.total-timesteps": "environment steps of the run, such as 1e6",
    "collector.num-envs": "parallel environments",
    "collector.threads": "threads that environments are stepped by",
    "policy.kind": "mlp, lstm or gru for ppo",
    "policy.hidden": "units of each hidden layer, such as 128,128",
    "algorithm.kind": "ppo, sac, td3 ...: `etude list --kinds`",
    "algorithm.learning-rate": "learning rate of Adam",
    "algorithm.gamma": "discount factor",
    "algorithm.rollout-steps": "steps of every environment in an iteration (n_steps in SB3)",
    "algorithm.minibatch-size": "steps of one gradient of PPO (batch_size in SB3)",
    "algorithm.update-epochs": "passes over the rollout buffer (n_epochs in SB3)",
    "algorithm.batch-size": "transitions of one gradient of SAC and TD3",
    "learner.device": "cpu, cuda or auto",
    "evaluation.every": "how often the policy is tested, such as '50000 steps'",
    "checkpoint.every": "how often the run is saved",
    "logs.wandb": "send rows to Weights & Biases",
}
"""Fields of recipes that are changed most often; the first page of help has these."""


def later(module: str) -> Callable[[list[str]], int | None]:
    """The function `run` of a command's module, which is imported when it is called."""

    def run(arguments: list[str]) -> int | None:
        with waiting("loading"):
            command = import_module(module)
        exit_code: int | None = command.run(arguments)
        return exit_code

    return run


def run_verb(program: str, usage: str, verbs: Verbs, arguments: list[str]) -> int:
    """Do what the first argument says; the exit code."""
    if not arguments or arguments[0] in (*HELP, "help"):
        print(usage, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"There is no command '{program} {verb}'.{hint} `{program} --help` shows them."
        )
    return verbs[verb](rest) or 0


def check_words(verb: str, arguments: list[str], known: Collection[str]) -> None:
    """Refuse arguments that a command without a config does not know."""
    for word in (each for each in arguments if each not in known):
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"There is no option {word}; {hint}`etude {verb} --help` shows them all.")
