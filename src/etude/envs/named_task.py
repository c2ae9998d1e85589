"""One's own batched task, by the name of its class: `--env.task my_module:MyTask`."""

from __future__ import annotations

import inspect
import typing
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from etude.core.abilities import EnvWrapper
from etude.core.contracts import BatchEnv, Exactness
from etude.core.errors import EtudeError, UsageError, describe_error, exits_as_errors
from etude.core.explain import explain
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.core.user_code import load_object
from etude.envs import DEFAULT_TASK
from etude.envs.config import EnvConfig
from etude.envs.probe import probe

METHODS = ("reset", "step", "snapshot", "restore", "close")


class TaskConfig(EnvConfig):
    """A batched task of one's own: any class with the methods of `BatchEnv`."""

    kind: Literal["task"] = "task"
    task: str = Field(DEFAULT_TASK, description="Its class, as module:Class or file.py:Class.")
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments for the class, or fields of its config."
    )
    evaluation_options: dict[str, bool | int | float | str] = Field(
        {}, description="Options that are others in evaluation."
    )

    def build(self, num_envs: int, threads: int = 1) -> BatchEnv:
        env = make_task(self, num_envs, threads)
        return env if self.exactness().exact else WithoutSnapshots(env)

    def build_unchecked(self, num_envs: int, threads: int = 1) -> BatchEnv:
        return make_task(self, num_envs, threads)

    def exactness(self) -> Exactness:
        """What the probe finds; asked once per process."""
        return probe(make_task, self, 2, self.task)

    def for_evaluation(self) -> Self:
        """The same task with the options of evaluation."""
        return self.replace(options={**self.options, **self.evaluation_options})


def task_class(name: str) -> type:
    """The class behind a name; whatever has not the methods of a `BatchEnv` is never called."""
    found = load_object(name, "module:Class, such as my_module:MyTask or my_task.py:MyTask")
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not inspect.isclass(found) or missing:
        if inspect.isclass(found) and issubclass(found, EnvConfig):
            raise UsageError(f"{name} is a kind of environment: write --env.kind {name}.")
        wanted = ", ".join(missing) if inspect.isclass(found) else "a class"
        raise UsageError(
            f"{name} is no task: it lacks {wanted}. Derive it from etude.ArrayTask, or give it "
            "the methods of etude.core.contracts.BatchEnv."
        )
    return found


def make_task(config: TaskConfig, num_envs: int, threads: int = 1) -> BatchEnv:
    """An instance: `Class(num_envs, threads, **options)`, or with a config first.

    A constructor whose first argument is `config: SomeModel` is given that model, made from the
    options; one without `threads` is given none.
    """
    task = task_class(config.task)
    signature, model = inspect.signature(task), _config_model(task)
    named: dict[str, Any] = {} if model is not None else dict(config.options)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if "threads" in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        named["threads"] = threads
    try:
        first = () if model is None else (model(**config.options),)
    except ValidationError as error:
        raise UsageError(f"{config.task}: {explain(error, model, 'env.options.')}") from error
    try:
        signature.bind(*first, num_envs, **named)
    except TypeError as error:
        raise UsageError(
            f"{config.task} does not take (num_envs, {', '.join(named)}): {error}. Options are "
            "written --env.options name value."
        ) from error
    try:
        with exits_as_errors(lambda: f"The constructor of {config.task}"):
            env: BatchEnv = task(*first, num_envs, **named)
    except EtudeError:
        raise
    except Exception as error:  # someone else's code may fail in any way
        raise UsageError(f"{config.task} cannot be made: {describe_error(error)}.") from error
    return env


def _config_model(task: type) -> type[BaseModel] | None:
    if "config" not in inspect.signature(task).parameters:
        return None
    model = typing.get_type_hints(task.__init__).get("config")  # type: ignore[misc]
    return model if inspect.isclass(model) and issubclass(model, BaseModel) else None


class WithoutSnapshots(EnvWrapper):
    """A task whose snapshots cannot be trusted: it trains, and a resume starts new episodes."""

    def snapshot(self) -> Tree:
        """Nothing, which tells a rollout to begin again."""
        return {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        self.inner.reset(key)
