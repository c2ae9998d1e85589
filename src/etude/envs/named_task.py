"""The kind `task`: a batched task of your own, by the name of its class."""

from __future__ import annotations

import inspect
import typing
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError

from etude.core.contracts import BatchEnv, EnvWrapper, Exactness
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
    """A batched task of your own: any class with the methods of `BatchEnv`."""

    kind: Literal["task"] = "task"
    task: str = Field(
        DEFAULT_TASK, description="Class of the task, as module:Class or file.py:Class."
    )
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments of the class, or fields of its config."
    )
    evaluation_options: dict[str, bool | int | float | str] = Field(
        {}, description="Options to change in evaluation."
    )

    @property
    def task_name(self) -> str:
        return self.task.rpartition(":")[2]

    def build(self, num_envs: int, threads: int = 1) -> BatchEnv:
        env = make_task(self, num_envs, threads)
        return env if self.exactness().exact else WithoutSnapshots(env)

    def build_unchecked(self, num_envs: int, threads: int = 1) -> BatchEnv:
        return make_task(self, num_envs, threads)

    def exactness(self) -> Exactness:
        """The verdict of the probe, cached per process."""
        return probe(make_task, self, 2, self.task)

    def for_evaluation(self) -> Self:
        """The config with the options of evaluation."""
        return self.replace(options={**self.options, **self.evaluation_options})


def task_class(name: str) -> type:
    """Load a class by its name; refuses classes without the methods of a `BatchEnv`."""
    found = load_object(name, "module:Class, such as my_module:MyTask or my_task.py:MyTask")
    missing = [method for method in METHODS if not callable(getattr(found, method, None))]
    if not inspect.isclass(found) or missing:
        if inspect.isclass(found) and issubclass(found, EnvConfig):
            raise UsageError(f"{name} is a kind of environment: write --env.kind {name}.")
        wanted = ", ".join(missing) if inspect.isclass(found) else "a class"
        raise UsageError(
            f"{name} is not a task: it lacks {wanted}. Derive it from etude.ArrayTask, or add "
            "the methods of etude.core.contracts.BatchEnv."
        )
    return found


def make_task(config: TaskConfig, num_envs: int, threads: int = 1) -> BatchEnv:
    """Construct a task: `Class(num_envs, threads, **options)`.

    If the first argument of the constructor is `config: SomeModel`, it gets that model with the
    options as its fields. `threads` is passed if the constructor accepts it.
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
    except Exception as error:  # third-party code may raise anything
        raise UsageError(f"{config.task} cannot be made: {describe_error(error)}.") from error
    return env


def _config_model(task: type) -> type[BaseModel] | None:
    if "config" not in inspect.signature(task).parameters:
        return None
    model = typing.get_type_hints(task.__init__).get("config")  # type: ignore[misc]
    return model if inspect.isclass(model) and issubclass(model, BaseModel) else None


class WithoutSnapshots(EnvWrapper):
    """Hides the snapshots of a task that are not exact: a resume then starts new episodes."""

    def snapshot(self) -> Tree:
        """An empty snapshot, after which a rollout starts new episodes."""
        return {}

    def restore(self, snapshot: Tree, key: Key) -> None:
        self.inner.reset(key)
