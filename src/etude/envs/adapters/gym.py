"""Gymnasium environments as a `BatchEnv`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import gymnasium
import mujoco
import numpy as np
from pydantic import Field

from etude.core.contracts import Array, BatchEnv, EnvSpec, Exactness, Observations, StepResult
from etude.core.errors import NonFinite, UsageError, exits_as_errors
from etude.core.keys import Key
from etude.core.trees import Tree
from etude.core.user_code import check_module_trust, load_module, module_or_file
from etude.envs.adapters import gym_spaces, object_state
from etude.envs.adapters.gym_spaces import FILM_RATE, NUMBERS, Spaces, one_line, rendered
from etude.envs.config import EnvConfig
from etude.envs.mujoco.simulation import avoid_sparse, digest
from etude.envs.probe import probe

_DIVERGED = [
    int(mujoco.mjtWarning.mjWARN_BADQPOS),
    int(mujoco.mjtWarning.mjWARN_BADQVEL),
    int(mujoco.mjtWarning.mjWARN_BADQACC),
    int(mujoco.mjtWarning.mjWARN_BADCTRL),
]


class GymConfig(EnvConfig):
    """An environment from Gymnasium's registry."""

    aliases = {"id": "env env_id env_name"}  # noqa: RUF012

    kind: Literal["gym"] = "gym"
    id: str = Field("CartPole-v1", description="Id in Gymnasium's registry.")
    kwargs: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments of the environment's constructor."
    )
    success_key: str | None = Field(
        None, description="Key in `info` of whether an episode succeeded."
    )
    engine: Literal["gymnasium", "batch"] = Field(
        "gymnasium",
        description="batch: MuJoCo's batch engine, faster, for the same tasks HalfCheetah, Hopper, "
        "Walker2d, Ant and Humanoid v5.",
    )

    python: str = Field(
        "",
        description="Interpreter or virtual environment in which the environments run, with "
        "packages of its own, or a name of `etude env list`; default: this interpreter.",
    )

    @property
    def task_name(self) -> str:
        return self.id.rpartition(":")[2]

    def build(self, num_envs: int, threads: int = 1) -> BatchEnv:
        if self.engine == "batch":
            if self.python:
                raise UsageError(
                    "env.engine batch is MuJoCo's batch engine in this interpreter: leave out "
                    "env.python, or take env.engine gymnasium."
                )
            from etude.envs.adapters.gym_native import native_env

            return native_env(self.id, self.kwargs, num_envs, threads)
        return instances(self, num_envs) if threads == 1 else self._spread(num_envs, threads)

    def _spread(self, num_envs: int, workers: int) -> BatchEnv:
        """Environments in worker processes."""
        from etude.envs.adapters.workers import EnvWorkers

        one = instances(self, 1)
        one.close()
        return EnvWorkers(
            gym_part,
            join_snapshots,
            self,
            one.spec,
            num_envs,
            workers,
            lambda: self.exactness().exact,
            one.bounds,
        )

    def for_film(self, size: tuple[int, int] = (1280, 720)) -> Self:
        if self.engine == "batch":
            return self
        kwargs: dict[str, Any] = {"render_mode": "rgb_array"}
        known = gymnasium.registry.get(self.id)
        if known is not None and str(known.entry_point).startswith("gymnasium.envs.mujoco."):
            kwargs |= {"width": size[0], "height": size[1]}  # others do not accept a size
            if not {"camera_id", "camera_name"} & {*self.kwargs}:
                # Without a name Gymnasium's camera stays where a Swimmer begins.
                kwargs["camera_name"] = "track"
        return self.replace(kwargs={**self.kwargs, **kwargs})

    def for_window(self) -> Self:
        if self.python:
            raise UsageError(
                f"'{self.id}' runs in another interpreter, which shows no window: `etude eval RUN "
                "--video` films it."
            )
        env = make_gym(self)
        modes = env.metadata.get("render_modes") or ()
        env.close()
        if not {"human", "rgb_array"} & {*modes}:
            raise UsageError(
                f"'{self.id}' cannot be shown: its metadata['render_modes'] names neither 'human' "
                "nor 'rgb_array'."
            )
        # Gymnasium shows the pictures of environments without a window of their own.
        return self.replace(kwargs={**self.kwargs, "render_mode": "human"})

    def modules(self) -> tuple[str, ...]:
        """Modules of the environment and its wrappers in Gymnasium's registry."""
        known = gymnasium.registry.get(self.id.rpartition(":")[2])
        if known is None or self.python:
            return ()
        points = [known.entry_point, *(each.entry_point for each in known.additional_wrappers)]
        return tuple(
            point.partition(":")[0] if isinstance(point, str) else module_or_file(point)
            for point in points
            if point is not None
        )

    def exactness(self) -> Exactness:
        """The verdict of the probe, cached per process."""
        if self.engine == "batch":
            return Exactness(True, "the snapshot holds every number the simulation continues from")
        return probe(unprobed, self, 2, self.id)


_WARNED: set[str] = set()


@contextmanager
def _warned_once() -> Iterator[None]:
    """Print each of MuJoCo's warnings once, not for every row that loads the model."""
    before = mujoco.get_mju_user_warning()

    def warn(text: str) -> None:
        if text not in _WARNED:
            _WARNED.add(text)
            print(f"MuJoCo: {text}", file=sys.stderr)

    mujoco.set_mju_user_warning(warn)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)


def make_gym(config: GymConfig) -> gymnasium.Env[Any, Any]:
    """Make one instance; errors are one sentence."""
    for text in config.kwargs.values():
        if isinstance(text, str) and ":" in text:  # Gymnasium imports the module before the colon.
            check_module_trust(text, text.partition(":")[0])
    where, _, name = config.id.rpartition(":")
    if where:  # Gymnasium would import it too, but not from the current folder.
        load_module(config.id, where)
    try:
        with _warned_once(), exits_as_errors(lambda: f"The constructor of '{config.id}'"):
            return gymnasium.make(name, disable_env_checker=True, **config.kwargs)
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.5)
        hint = f" Nearest: {', '.join(near)}." if near else ""
        raise UsageError(
            f"Gymnasium has no environment '{config.id}'.{hint} Write an environment that another "
            "package registers as package:ID."
        ) from error
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise UsageError(gym_spaces.missing_package(config.id, error)) from error
    except TypeError as error:
        raise UsageError(
            f"'{config.id}' does not take these arguments: {one_line(error)}."
        ) from error


class GymEnv:
    """Separate instances, stepped in sequence."""

    def __init__(
        self, config: GymConfig, num_envs: int, *, exact: bool | None = None, first: int = 0
    ) -> None:
        """exact: verdict of the probe; None runs it for the first snapshot. first: number of the
        first environment, if this is a part of a larger batch."""
        self.num_envs, self._first = num_envs, first
        self._config = config
        self._exact = exact
        self._envs = self._instances(config, num_envs)
        self._physics = [gym_spaces.physics(env) for env in self._envs]
        model, notes = self._describe()
        self._row, self.call = 0, "reset"
        self._key: Key | None = None
        self._started = False
        self._episode = np.zeros(num_envs, np.int64)
        # Read from each, because reading changes the state of an environment.
        limits = [env.spec.max_episode_steps if env.spec else None for env in self._envs]
        env = self._envs[0]
        self.step_rate = float(env.metadata.get("render_fps") or FILM_RATE)
        self.watch: Callable[[int], None] | None = None
        """Called with each row after its step, before a finished row is reset."""
        self._spaces = Spaces(env.observation_space, env.action_space, config.id)
        self.bounds = self._spaces.bounds
        self.spec = EnvSpec(
            observations=self._spaces.observations,
            action=self._spaces.action,
            max_episode_steps=limits[0],
            statistics=() if config.success_key is None else ("is_success",),
            model=model,
            notes=notes,
        )

    def _instances(self, config: GymConfig, num_envs: int) -> list[gymnasium.Env[Any, Any]]:
        """The environments."""
        return [make_gym(config) for _ in range(num_envs)]

    def _describe(self) -> tuple[str, tuple[str, ...]]:
        """Hash of the model, and notes for the plan."""
        models = [pair[0] for pair in self._physics if pair is not None]
        notes = [avoid_sparse(model) for model in models]
        return (digest(models[0]), notes[0]) if models else ("", ())

    def reset(self, key: Key) -> Observations:
        """Reset every row to its episode 0."""
        self._key = key
        self._episode[:] = 0
        obs = self._spaces.empty(self.num_envs)
        for row in range(self.num_envs):
            self._spaces.store(obs, row, self._begin(row))
        self._started = True
        return obs

    def step(self, actions: Array) -> StepResult:
        """One step of every row; finished rows are reset.

        actions: [rows, n] float32 for a box, [rows] or [rows, n] integers for choices.
        """
        obs = self._spaces.empty(self.num_envs)
        reward = np.zeros(self.num_envs, np.float32)
        terminated = np.zeros(self.num_envs, np.bool_)
        truncated = np.zeros(self.num_envs, np.bool_)
        endings: Observations = {}
        success: list[float] = []
        spaces, physics, watch = self._spaces, self._physics, self.watch
        sent = spaces.actions(actions)
        for row, env in enumerate(self._envs):
            self._row = row
            result = env.step(sent[row])
            try:
                now, given, ended, cut, info = result
            except (TypeError, ValueError) as error:
                raise UsageError(
                    f"'{self._config.id}' returns {_type_names(result)} from step: it must be "
                    "observation, reward, terminated, truncated, info."
                ) from error
            if given.__class__ not in NUMBERS:
                given = spaces.number(given, "the reward")
            reward[row] = given
            if physics[row] is not None:
                self._check(row)
            if watch is not None:
                watch(row)
            if ended is not False or cut is not False:
                ended, cut = spaces.flag(ended, "terminated"), spaces.flag(cut, "truncated")
            if ended or cut:
                terminated[row] = ended
                # An episode that terminates at the time limit is not truncated.
                truncated[row] = cut and not ended
                # Stored before the reset, which may write to the observation.
                endings = endings or spaces.empty(self.num_envs)
                spaces.store(endings, row, now)
                if (key := self._config.success_key) is not None:
                    success.append(float(spaces.number(info.get(key, 0.0), f"info['{key}']")))
                self._episode[row] += 1
                now = self._begin(row)
            spaces.store(obs, row, now)
        rows = np.flatnonzero(terminated | truncated)
        final_obs = {name: array[rows] for name, array in (endings or obs).items()}
        episodes = {name: np.array(success) for name in self.spec.statistics if success}
        return StepResult(obs, reward, terminated, truncated, rows, final_obs, episodes)

    def _begin(self, row: int) -> Any:
        if self._key is None:
            raise UsageError("reset or restore an environment before stepping it.")
        stream = self._key.episode(self._first + row, int(self._episode[row]))
        self._row, self.call = row, "reset"
        given = self._envs[row].reset(seed=int(stream.integers(2**31)))
        self.call = "step"
        if not isinstance(given, tuple) or len(given) != 2:
            raise UsageError(
                f"'{self._config.id}' returns {_type_names(given)} from reset: it must be "
                "observation, info."
            )
        return given[0]

    def where(self) -> str:
        """Description of the environment that is being stepped or reset."""
        return f"environment {self._first + self._row} ('{self._config.id}')"

    def picture(self, row: int) -> Array:
        """[height, width, 3] uint8: the environment's rendering in the mode "rgb_array"."""
        return rendered(self._envs[row].render, self._config.id)

    def _check(self, row: int) -> None:
        # MuJoCo resets a diverged simulation and continues; these counters show it.
        pair = self._physics[row]
        if pair is not None and any(pair[1].warning[code].number for code in _DIVERGED):
            raise NonFinite(f"physics of environment {self._first + row} in '{self._config.id}'")

    def snapshot(self) -> Tree:
        """The state of an exact environment; {} for others, whose rows start new episodes.

        {"episode": [rows], "attributes": uint8 [rows, n], "physics": uint8 [rows, n]}
        """
        if self._exact is None:
            self._exact = self._config.exactness().exact
        if not self._exact:
            return {}
        texts = [self._save(env).encode("utf-8") for env in self._envs]
        lines = _stacked_texts([np.frombuffer(text, np.uint8)[None] for text in texts])
        tree: Tree = {"episode": self._episode.copy(), "attributes": lines}
        pairs = [pair for pair in self._physics if pair is not None]
        if pairs:
            tree["physics"] = np.stack([gym_spaces.save_physics(*pair) for pair in pairs])
        return tree

    def restore(self, snapshot: Tree, key: Key) -> None:
        """Restore a snapshot of an exact environment."""
        if snapshot["episode"].shape != self._episode.shape:
            raise UsageError(
                f"This snapshot has {snapshot['episode'].size} rows, "
                f"and the environment {self.num_envs}."
            )
        self._key = key
        self._episode[:] = snapshot["episode"]
        for row, env in enumerate(self._envs):
            if not self._started:
                # Creates what an environment only creates in its first reset.
                self._begin(row)
            self._load(env, snapshot["attributes"][row].tobytes().decode())
            pair = self._physics[row]
            if pair is not None and "physics" in snapshot:
                gym_spaces.load_physics(*pair, snapshot["physics"][row])
        self._started = True

    def _save(self, env: Any) -> str:
        """The state of one environment as one line of JSON, without physics."""
        return object_state.save(env)

    def _load(self, env: Any, text: str) -> None:
        object_state.load(env, text)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class RemoteGymEnv(GymEnv):
    """A batch of environments in a process of another interpreter."""

    def _instances(self, config: GymConfig, num_envs: int) -> list[gymnasium.Env[Any, Any]]:
        from etude.envs.adapters.interpreter import Interpreter, RemoteEnv

        given = (config.python, config.id, config.kwargs, config.success_key, num_envs)
        self._interpreter = Interpreter(*given)
        return [RemoteEnv(self._interpreter, row) for row in range(num_envs)]

    def _describe(self) -> tuple[str, tuple[str, ...]]:
        hashed, words = self._interpreter.describe()
        return hashed, (words,)

    def _save(self, env: Any) -> str:
        return str(env.save())

    def _load(self, env: Any, text: str) -> None:
        env.load(text)

    def _revive(self) -> None:
        """Start a lost process again, before its environments get a new state."""
        if self._interpreter.is_lost:
            self._interpreter.start()
            self._started = False

    def reset(self, key: Key) -> Observations:
        self._revive()
        return super().reset(key)

    def restore(self, snapshot: Tree, key: Key) -> None:
        self._revive()
        super().restore(snapshot, key)

    def interrupt(self, seconds: float) -> None:
        """Kill the process, whose call has taken too long; the waiting call raises an error."""
        where = self.where()
        self._interpreter.kill(
            f"was killed, because {where} did not return within {seconds:g} s: for calls that take "
            "longer raise --collector.deadline"
        )

    def close(self) -> None:
        if not self._interpreter.is_lost:
            self._interpreter.end()


def _type_names(given: Any) -> str:
    """Names of the types that a method returned."""
    parts = given if isinstance(given, tuple) else (given,)
    return ", ".join(type(part).__name__ for part in parts) or "nothing"


def _stacked_texts(texts: list[Array]) -> Array:
    """Stack texts uint8 [k, w] of JSON, padded with blanks, to [n, width]."""
    width = max(text.shape[1] for text in texts)
    blank = ord(" ")
    padded = [np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=blank) for t in texts]
    return np.concatenate(padded)


def join_snapshots(parts: list[Tree]) -> Tree:
    """Join the snapshots of contiguous parts of the environments."""
    whole = {name: [part[name] for part in parts] for name in parts[0]}
    attributes = _stacked_texts(whole.pop("attributes"))
    joined: Tree = {name: np.concatenate(arrays) for name, arrays in whole.items()}
    return {**joined, "attributes": attributes}


def gym_part(config: GymConfig, first: int, num_envs: int) -> GymEnv:
    """The part of the environments that belongs to a worker process."""
    return instances(config, num_envs, exact=True, first=first)


def unprobed(config: GymConfig, num_envs: int) -> GymEnv:
    """Environments whose snapshots are taken without a probe."""
    return instances(config, num_envs, exact=True)


def instances(config: GymConfig, num_envs: int, **given: Any) -> GymEnv:
    """The environments in this process, or in a process of another interpreter."""
    if config.python:
        return RemoteGymEnv(config, num_envs, **given)
    return GymEnv(config, num_envs, **given)
