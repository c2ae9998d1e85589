"""Commands by name; the module of a command is imported when the command runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from importlib import import_module

from etude.core.errors import UsageError
from etude.core.output import waiting

Command = Callable[[list[str]], int | None]
"""A command: arguments -> exit code, None for 0."""
Verbs = dict[str, Command]
HELP_ALL = "--help-all"
HELP = {"-h", "--help", HELP_ALL}
OFTEN = {
    "env.id": "a Gymnasium environment, for example HalfCheetah-v5 (recipes ppo, sac)",
    "env.kind": "a MuJoCo task of your own: FILE.py:Class; or one of `etude list --kinds`",
    "env.task": "a task of your own in numpy: FILE.py:Class or module:Class",
    "seed": "seed of all random numbers of the run",
    "start-from": "a run, checkpoint or policy to start from; --from is short for it",
    "clock.total-timesteps": "environment steps of the run, for example 1e6",
    "collector.num-envs": "parallel environments",
    "collector.threads": "threads that step the environments",
    "policy.kind": "mlp, lstm or gru for ppo",
    "policy.hidden": "units of each hidden layer, for example 128,128",
    "algorithm.kind": "ppo, sac, td3 ...: `etude list --kinds`",
    "algorithm.learning-rate": "learning rate of Adam",
    "algorithm.gamma": "discount factor",
    "algorithm.rollout-steps": "steps of every environment in an iteration (n_steps in SB3)",
    "algorithm.minibatch-size": "steps of a minibatch of PPO (batch_size in SB3)",
    "algorithm.update-epochs": "passes over the rollout buffer (n_epochs in SB3)",
    "algorithm.batch-size": "transitions of a batch of SAC and TD3",
    "learner.device": "cpu, cuda or auto",
    "evaluation.every": "interval between evaluations, for example '50000 steps'",
    "checkpoint.every": "interval between checkpoints",
    "logs.wandb": "send rows to Weights & Biases",
}
"""Fields of recipes that are changed most often, for --help."""


def lazy(module: str, function: str = "run") -> Command:
    """A command whose module is imported when it is called."""

    def run(arguments: list[str]) -> int | None:
        with waiting("loading"):
            command = getattr(import_module(module), function)
        exit_code: int | None = command(arguments)
        return exit_code

    return run


def run_verb(program: str, usage: str, verbs: Verbs, arguments: list[str]) -> int:
    """Run the command that the first argument names; the exit code."""
    if not arguments or arguments[0] in (*HELP, "help"):
        print(usage, end="")
        return 0
    verb, rest = arguments[0], arguments[1:]
    if verb not in verbs:
        near = difflib.get_close_matches(verb, verbs, n=1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        raise UsageError(
            f"There is no command '{program} {verb}'.{hint} `{program} --help` shows them all."
        )
    return verbs[verb](rest) or 0


def check_words(verb: str, arguments: list[str], known: Collection[str]) -> None:
    """Refuse unknown arguments of a command without a config."""
    for word in (each for each in arguments if each not in known):
        near = difflib.get_close_matches(word, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"There is no option {word}; {hint}`etude {verb} --help` shows them all.")
