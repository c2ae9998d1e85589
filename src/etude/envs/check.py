"""Checks of the contract of `BatchEnv`, each with the problem and its fix.

`etude check` runs them on any environment, and the tests on all environments of this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import numpy as np

from etude.core.contracts import Array, BatchEnv, Observations, StepResult
from etude.core.errors import EtudeError, describe_error
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.trees import digest, leaves
from etude.envs.probe import play, presence, random_actions

MakeEnv = Callable[[int, int], BatchEnv]
"""(number of environments, threads) -> env."""
KEY = Key(7, ("contract",))
ENVIRONMENTS = 3


class Broken(Exception):
    """Raised by a check that failed."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def _break(problem: str, fix: str) -> NoReturn:
    raise Broken(problem, fix)


def check_determinism(make: MakeEnv, steps: int) -> None:
    """The key determines everything; other keys give other episodes; threads have no effect."""
    first, second = make(ENVIRONMENTS, 1), make(ENVIRONMENTS, 2)
    draw = "Draw from key.episode(row, episode) only: no global or unseeded generator, no clock."
    obs = first.reset(KEY)
    start = digest(obs)
    if digest(second.reset(KEY)) != start:
        _break("two resets with one key give different starts", draw)
    actions = random_actions(first, steps, KEY.child("play"), reach=1.2)
    expected = play(first, actions)
    found = play(second, actions)
    if found != expected:
        step = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
        _break(f"two instances with one key and the same actions differ at step {step + 1}", draw)
    other = second.reset(KEY.child("other"))
    varied = any(len({row.tobytes() for row in array}) > 1 for array in obs.values())
    if varied and digest(other) == start:
        _break("another key gives the same starts", draw)
    if digest(second.reset(KEY)) != start or play(second, actions) != expected:
        _break(
            "a reset with the same key does not give the same episodes again",
            getattr(
                first,
                "state_advice",
                "Let reset restore everything that a step changes, including episode counters.",
            ),
        )


def check_independence(make: MakeEnv, steps: int) -> None:
    """Other actions in environment 1 do not change any bit of environments 0 and 2."""
    first, second = make(ENVIRONMENTS, 1), make(ENVIRONMENTS, 1)
    first.reset(KEY)
    second.reset(KEY)
    at = np.arange(first.num_envs) // first.spec.agents == 1
    where = "row 1" if first.spec.agents == 1 else "environment 1"
    others = random_actions(first, steps, KEY.child("other play"), reach=1.2)
    actions = random_actions(first, steps, KEY.child("play"), reach=1.2)
    for step, (action, other) in enumerate(zip(actions, others, strict=True)):
        changed = action.copy()
        changed[at] = other[at]
        one, two = first.step(action), second.step(changed)
        arrays = {f"obs '{name}'": (one.obs[name], two.obs[name]) for name in one.obs}
        for name in ("reward", "terminated", "truncated"):
            arrays[name] = (getattr(one, name), getattr(two, name))
        for name, (a, b) in arrays.items():
            if a[~at].tobytes() != b[~at].tobytes():
                _break(
                    f"another action in {where} changes {name} of other rows at step {step + 1}",
                    "Look for a sum over rows, a shared generator or a shared array.",
                )


def check_snapshot(make: MakeEnv, steps: int) -> None:
    """Steps from a snapshot are equal in the same, a used and a new instance."""
    env = make(ENVIRONMENTS, 1)
    env.reset(KEY)
    play(env, random_actions(env, 30, KEY.child("before")))
    snapshot = env.snapshot()
    for path, leaf in leaves(snapshot):
        if not isinstance(leaf, dict) and np.shape(leaf)[:1] != (env.num_envs,):
            _break(
                f"'{path}' in the snapshot has no leading row axis",
                "Put only arrays [rows, ...] into a snapshot; constants are not state.",
            )
    before = digest(snapshot)
    actions = random_actions(env, steps, KEY.child("after"), reach=1.2)
    expected = play(env, actions)
    if digest(snapshot) != before:
        _break("a step changed an earlier snapshot", "Copy every array in snapshot().")
    end = digest(env.snapshot())
    used, new = make(ENVIRONMENTS, 2), make(ENVIRONMENTS, 3)
    used.reset(KEY.child("elsewhere"))
    play(used, random_actions(used, 11, KEY.child("past")))
    for place, instance in (("its own", env), ("a used", used), ("a new", new)):
        instance.restore(snapshot, KEY)
        again = digest(instance.snapshot())
        found = play(instance, actions)
        keep = getattr(
            env,
            "state_advice",
            "Put everything that a step reads into snapshot(), and copy it back in restore().",
        )
        if found != expected:
            step = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
            _break(f"restored in {place} instance it differs after {step + 1} steps", keep)
        if again != before or digest(instance.snapshot()) != end:
            _break(f"restored in {place} instance its snapshot is not the one restored", keep)


BUILD = "it can be built and stepped"
OBSERVATIONS = "observations are as the spec says, and finite"
REWARDS = "rewards are one finite float32 per environment"
ENDINGS = "an episode is terminated or truncated, never both"
FINISHED = "finished environments and what they ended on are reported"
RESETS = "finished environments start again in the same step"
STATISTICS = "episode statistics are those of the spec"
LIMIT = "no episode outlasts max_episode_steps"
START = "no episode starts solved"
OWNERSHIP = "what was given out stays as it was"
DETERMINISM = "a key decides everything"
INDEPENDENCE = "environments do not touch each other"
SNAPSHOT = "a snapshot continues bit for bit"
ITEMS = (
    BUILD,
    OBSERVATIONS,
    REWARDS,
    ENDINGS,
    FINISHED,
    RESETS,
    STATISTICS,
    LIMIT,
    START,
    OWNERSHIP,
    DETERMINISM,
    INDEPENDENCE,
    SNAPSHOT,
)
_NEED_AN_END = (FINISHED, RESETS, STATISTICS, START)


@dataclass(frozen=True)
class Finding:
    """Result of one check: passed, failed (with the problem and its fix), or not checked."""

    item: str
    verdict: Literal["passed", "failed", "not checked"]
    problem: str = ""
    fix: str = ""


@waiting("checking the environment")
def check_env(
    make: MakeEnv, steps: int = 200, exact_steps: int = 200, agents: int = 1
) -> list[Finding]:
    """Check the whole contract with three environments and several threads; a finding per item.

    make: (num_envs, threads) -> env. agents: rows per environment, as in its spec.
    """

    def make_env(environments: int, threads: int) -> BatchEnv:
        return make(environments * agents, threads)

    inspection = Inspection()
    inspection.run(make_env, steps)
    found = {item: inspection.finding(item) for item in ITEMS}
    others: dict[str, tuple[Callable[[MakeEnv, int], None], int]] = {
        DETERMINISM: (check_determinism, steps),
        INDEPENDENCE: (check_independence, steps),
        SNAPSHOT: (check_snapshot, exact_steps),
    }
    for item, (check, count) in others.items():
        if found[BUILD].verdict == "failed":
            found[item] = Finding(item, "not checked", "it cannot be stepped")
            continue
        try:
            check(make_env, count)
            found[item] = Finding(item, "passed")
        except Broken as broken:
            found[item] = Finding(item, "failed", broken.problem, broken.fix)
        except Exception as error:  # third-party code may raise anything
            found[item] = Finding(item, "failed", describe_error(error), "Fix the code named here.")
    return [found[item] for item in ITEMS]


class Inspection:
    """Checks every step of random play, and keeps the first problem of each item."""

    def __init__(self) -> None:
        self.problems: dict[str, Broken] = {}
        self.num_ended = 0
        self.num_same = 0
        self.num_solved_at_once = 0

    def finding(self, item: str) -> Finding:
        if item in self.problems:
            broken = self.problems[item]
            return Finding(item, "failed", broken.problem, broken.fix)
        if BUILD in self.problems:
            return Finding(item, "not checked", "it cannot be stepped")
        if item in _NEED_AN_END and not self.num_ended:
            return Finding(item, "not checked", "no episode ended; give more --steps")
        return Finding(item, "passed")

    def run(self, make: MakeEnv, steps: int) -> None:
        try:
            env = make(ENVIRONMENTS, 1)
            obs = env.reset(KEY)
            self._observations(env, obs, env.num_envs, "reset")
            lengths = np.zeros(env.num_envs, np.int64)
            for action in random_actions(env, steps, KEY.child("look"), reach=1.2):
                kept = {name: np.array(array) for name, array in obs.items()}
                sent, there = action.copy(), _present(env)
                result = env.step(action)
                lengths += there
                self._ownership(obs, kept, action, sent)
                if self._step(env, result):
                    self._absent(result, there, _present(env))
                    self._episodes(env, result, lengths)
                    lengths[result.terminated | result.truncated] = 0
                obs = result.obs
            env.close()
        except EtudeError as error:
            self._fail(BUILD, str(error), "Fix the problem named here.")
        except Exception as error:  # third-party code may raise anything
            self._fail(BUILD, describe_error(error), "Fix the code named here.")
        self._totals()

    def _fail(self, item: str, problem: str, fix: str) -> None:
        self.problems.setdefault(item, Broken(problem, fix))

    def _observations(self, env: BatchEnv, obs: Observations, rows: int, where: str) -> None:
        if set(obs) != set(env.spec.observations):
            self._fail(
                OBSERVATIONS,
                f"{where} gives {sorted(obs)}, the spec names {sorted(env.spec.observations)}",
                "Give exactly the names in spec.observations, in every step.",
            )
            return
        for name, spec in env.spec.observations.items():
            array, shape = np.asarray(obs[name]), (rows, *spec.shape)
            if array.shape != shape or array.dtype != np.dtype(spec.dtype):
                self._fail(
                    OBSERVATIONS,
                    f"'{name}' in {where} is {array.dtype} {list(array.shape)}, the spec says "
                    f"{spec.dtype} {list(shape)}",
                    f"Convert it with .astype(np.{spec.dtype}), or correct spec.observations.",
                )
            elif not np.isfinite(array).all():
                row, *place = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
                self._fail(
                    OBSERVATIONS,
                    f"'{name}' in {where} is not finite in row {row}, column {place}",
                    "Look for a division by zero or a state that grows without bound.",
                )

    def _ownership(self, obs: Observations, kept: Observations, action: Array, sent: Array) -> None:
        if any(obs[name].tobytes() != kept[name].tobytes() for name in kept):
            self._fail(
                OWNERSHIP,
                "a step wrote into the observations of the step before",
                "Return a new array, or a .copy(), from every step.",
            )
        if action.tobytes() != sent.tobytes():
            self._fail(OWNERSHIP, "a step wrote into its actions", "Work on a copy of the actions.")

    def _step(self, env: BatchEnv, result: StepResult) -> bool:
        """Check the arrays of a step; returns whether its episodes can be checked too."""
        self._observations(env, result.obs, env.num_envs, "obs")
        rows = (env.num_envs,)
        reward = np.asarray(result.reward)
        if reward.shape != rows or reward.dtype != np.float32:
            self._fail(
                REWARDS,
                f"reward is {reward.dtype} {list(reward.shape)}, not float32 {list(rows)}",
                "Return one reward per environment with .astype(np.float32).",
            )
        elif not np.isfinite(reward).all():
            self._fail(
                REWARDS,
                f"the reward of row {int(np.argmin(np.isfinite(reward)))} is not finite",
                "Look for a division by zero or a logarithm of zero.",
            )
        ends = np.asarray(result.terminated), np.asarray(result.truncated)
        for name, array in zip(("terminated", "truncated"), ends, strict=True):
            if array.shape != rows or array.dtype != np.bool_:
                self._fail(
                    ENDINGS,
                    f"{name} is {array.dtype} {list(array.shape)}, not bool {list(rows)}",
                    "Return one bool per environment.",
                )
                return False
        if (ends[0] & ends[1]).any():
            self._fail(
                ENDINGS,
                f"row {int(np.argmax(ends[0] & ends[1]))} is terminated and truncated at once",
                "Write truncated &= ~terminated: a terminated episode has no next value.",
            )
        return True

    def _absent(self, result: StepResult, before: Array, after: Array) -> None:
        """Check that rows without an agent, `before` and `after` the step, are zero."""
        done = result.terminated | result.truncated
        for item, wrong, what in (
            (ENDINGS, done & ~before, "ends an episode"),
            (REWARDS, (result.reward != 0) & ~before, "is rewarded"),
            (OBSERVATIONS, _nonzero(result.obs, before.size) & ~after, "observes something"),
        ):
            if wrong.any():
                self._fail(
                    item,
                    f"row {int(np.argmax(wrong))} {what} though it is absent",
                    "Leave zeros in the rows that `present` leaves out.",
                )

    def _episodes(self, env: BatchEnv, result: StepResult, lengths: Array) -> None:
        """Check what a step reports of the episodes that ended in it, after `lengths` [rows]
        steps."""
        done = result.terminated | result.truncated
        rows, final = np.flatnonzero(done), np.asarray(result.final_envs)
        if final.tolist() != rows.tolist() or final.dtype != np.int64:
            self._fail(
                FINISHED,
                f"final_envs is {final.dtype} {final.tolist()}, but rows {rows.tolist()} ended",
                "Return np.flatnonzero(terminated | truncated).",
            )
            return
        before = OBSERVATIONS in self.problems
        self._observations(env, result.final_obs, rows.size, "final_obs")
        if OBSERVATIONS in self.problems and not before:
            broken = self.problems.pop(OBSERVATIONS)
            self._fail(FINISHED, broken.problem, "Give obs[final_envs] from before the reset.")
            return
        self._limit(env, done, lengths)
        self._statistics(env, result, lengths)
        self.num_ended += rows.size
        for i, row in enumerate(rows):
            same = all(
                result.obs[name][row].tobytes() == result.final_obs[name][i].tobytes()
                for name in result.final_obs
            )
            self.num_same += same

    def _limit(self, env: BatchEnv, done: Array, lengths: Array) -> None:
        limit = env.spec.max_episode_steps
        if limit is not None and ((lengths >= limit) & ~done).any():
            row = int(np.argmax((lengths >= limit) & ~done))
            self._fail(
                LIMIT,
                f"row {row} goes on after {int(lengths[row])} steps; max_episode_steps is {limit}",
                "Truncate at max_episode_steps, or set it to None in the spec.",
            )

    def _statistics(self, env: BatchEnv, result: StepResult, lengths: Array) -> None:
        count = result.final_envs.size
        if not count:
            return
        if set(result.episodes) != set(env.spec.statistics):
            self._fail(
                STATISTICS,
                f"a step reports {sorted(result.episodes)}, spec.statistics names "
                f"{sorted(env.spec.statistics)}",
                "Report exactly those names whenever an episode ends.",
            )
        for name, array in result.episodes.items():
            if array.shape != (count,) or array.dtype != np.float64:
                self._fail(
                    STATISTICS,
                    f"'{name}' is {array.dtype} {list(array.shape)} for {count} finished episodes",
                    "Report one float64 per finished row, in the order of final_envs.",
                )
                return
        success = result.episodes.get("is_success", np.zeros(count))
        if not np.isin(success, (0.0, 1.0)).all():
            self._fail(
                STATISTICS,
                f"'is_success' is {success[~np.isin(success, (0.0, 1.0))][0]:g} for an episode",
                "Report 1 for a success and 0 for a failure: a success rate is their mean.",
            )
        self.num_solved_at_once += int(((lengths[result.final_envs] == 1) & (success > 0)).sum())

    def _totals(self) -> None:
        if self.num_ended and self.num_same == self.num_ended:
            self._fail(
                RESETS,
                f"after all {self.num_ended} endings the row went on from where it ended",
                "Reset finished environments inside the step, and observe again: obs is the new "
                "start, final_obs the end.",
            )
        if self.num_solved_at_once > self.num_ended // 10:
            self._fail(
                START,
                f"{self.num_solved_at_once} of {self.num_ended} episodes succeeded in their first "
                "step under random actions",
                "Draw the start until it is not solved already.",
            )


def _present(env: BatchEnv) -> Array:
    """Rows with an agent, [rows] bool; a copy, because the environment may change its array."""
    present = presence(env)
    return np.ones(env.num_envs, np.bool_) if present is None else present.copy()


def _nonzero(obs: Observations, rows: int) -> Array:
    """Rows with a nonzero observation, [rows] bool."""
    found: Array = np.any([array.reshape(rows, -1).any(axis=1) for array in obs.values()], axis=0)
    return found


def render_findings(name: str, findings: list[Finding]) -> str:
    """The findings as text, with the verdict in the last line."""
    marks = {"passed": "ok", "failed": "FAILED", "not checked": "-"}
    lines = []
    for finding in findings:
        lines.append(f"  {marks[finding.verdict]:<8}{finding.item}")
        if finding.problem:
            lines.append(f"          {finding.problem}.")
        if finding.fix:
            lines.append(f"          Fix: {finding.fix}")
    failed = sum(finding.verdict == "failed" for finding in findings)
    skipped = sum(finding.verdict == "not checked" for finding in findings)
    verdict = "keeps the contract" if not failed else f"breaks it in {failed} of {len(findings)}"
    rest = f"; {skipped} not checked" if skipped else ""
    return "\n".join([*lines, f"{name} {verdict}{rest}."]) + "\n"
