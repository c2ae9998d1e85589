from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_env_contract import KEY, check_contract, play, random_actions
from etude.cli.check import env_config
from etude.core.contracts import ActionSpec, Array, ArraySpec, StepResult
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import digest
from etude.envs.adapters.pettingzoo import PettingZooConfig, PettingZooEnv
from etude.envs.check import ENDINGS, OBSERVATIONS, REWARDS, check_env

pytest.importorskip("mpe2", reason="pip install 'etude[multiagent]'")

ENDS = ("terminated", "truncated", "both", "listed", "silent", "blind")
"""How a life ends: by a flag, by both; flagged but still listed for a step; gone without a flag;
gone without a flag or a last observation."""


@dataclass(frozen=True)
class Life:
    """From the reset or step that lists an agent to the step it ends in."""

    enters: int
    leaves: int
    end: str = "terminated"


class Scripted:
    """Agents that come and go by a script. They see (agent, seed, step), and are paid what names
    the step and the action, so that nothing can be lost, doubled or mixed up unseen."""

    def __init__(self, script: str, box: bool = False) -> None:
        self.lives = {name: [Life(*life) for life in lives] for name, lives in json.loads(script)}
        self.possible_agents = list(self.lives)
        self.agents: list[str] = []
        self.box = box
        self.time = self.seed = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-2, 4, (1,), np.float32) if self.box else spaces.Discrete(5, start=1)

    def alive(self, name: str) -> bool:
        return any(life.enters <= self.time < life.leaves for life in self.lives[name])

    def seen(self, names: list[str]) -> dict[str, Any]:
        return {n: observed(self.possible_agents.index(n), self.seed, self.time) for n in names}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.time, self.seed = 0, seed
        self.agents = [name for name in self.possible_agents if self.alive(name)][::-1]
        return self.seen(self.agents), {}

    def step(self, actions: Any) -> Any:
        acted = [name for name in self.agents if self.alive(name)]
        assert sorted(actions) == sorted(acted)
        self.time += 1
        ends = {name: self.end(name) for name in self.lives}
        self.agents = [n for n in self.possible_agents if self.alive(n) or ends[n] == "listed"]
        gone = [name for name in acted if not self.alive(name) and ends[name] != "blind"]
        # To one who is not there, which must go nowhere.
        reward = dict.fromkeys(self.lives, -1.0)
        reward |= {name: paid(self.time, actions[name]) for name in acted}
        terminated = {n: end in ("terminated", "both", "listed") for n, end in ends.items()}
        truncated = {n: end in ("truncated", "both") for n, end in ends.items()}
        return self.seen(self.agents + gone), reward, terminated, truncated, {}

    def end(self, name: str) -> str:
        return next((life.end for life in self.lives[name] if life.leaves == self.time), "")

    def close(self) -> None:
        pass


class Hidden(Scripted):
    """Chance that no snapshot can hold."""

    def seen(self, names: list[str]) -> dict[str, Any]:
        return {name: value + random.random() for name, value in super().seen(names).items()}


def observed(slot: int, seed: int, time: int) -> Any:
    return np.array([slot + 1, seed % 4096, time], np.float32)


def paid(time: int, action: Any) -> float:
    return float(1000 * time + np.sum(action))


def scripted(lives: list[list[Life]], **options: Any) -> PettingZooConfig:
    script = json.dumps(
        [
            (f"agent {i}", [(life.enters, life.leaves, life.end) for life in own])
            for i, own in enumerate(lives)
        ]
    )
    box = options.pop("box", False)
    name = options.pop("name", "Scripted")
    return PettingZooConfig(
        parallel=f"{__name__}:{name}", kwargs={"script": script, "box": box}, **options
    )


THREE = [
    [Life(0, 2)],
    [Life(0, 5, "truncated")],
    [Life(1, 3, "silent")],
]


def test_agents_come_and_go_as_written() -> None:
    """Agent 0 dies in step 2; agent 2 comes with step 1 and vanishes in step 3; 1 ends it in 5."""
    env = PettingZooEnv(scripted(THREE), 3)
    obs = env.reset(KEY)["state"]
    table = [env.present.tolist()]
    rewards, ends, finals = [], [], []
    for _ in range(6):
        result = env.step(np.array([0, 1, 2]))
        absent = result.obs["state"][~env.present]
        assert not absent.any()
        table.append(env.present.tolist())
        rewards.append(result.reward.tolist())
        ends.append((np.flatnonzero(result.terminated), np.flatnonzero(result.truncated)))
        finals.append((result.final_envs.tolist(), result.final_obs["state"][:, 2].tolist()))
    t, f = True, False
    assert table == [[t, t, f], [t, t, t], [f, t, t], [f, t, f], [f, t, f], [t, t, f], [t, t, t]]
    # Discrete actions start at 1, so the agents are paid 1, 2 and 3 beside the step's thousands.
    assert rewards == [
        [1001, 1002, 0], [2001, 2002, 2003], [0, 3002, 3003], [0, 4002, 0], [0, 5002, 0],
        [1001, 1002, 0],
    ]  # fmt: skip
    assert [[rows.tolist() for rows in pair] for pair in ends] == [
        [[], []], [[0], []], [[], [2]], [[], []], [[], [1]], [[], []],
    ]  # fmt: skip
    assert finals == [([], []), ([0], [2]), ([2], [3]), ([], []), ([1], [5]), ([], [])]
    assert obs[:, 0].tolist() == [1, 2, 0]
    assert env.spec.agents == 3


def test_one_who_vanishes_unseen_ended_on_what_it_saw_last_even_after_a_restore() -> None:
    config = scripted([[Life(0, 2, "blind")], [Life(0, 4)]])
    env, other = PettingZooEnv(config, 2), PettingZooEnv(config, 2)
    env.reset(KEY)
    env.step(np.zeros(2, np.int64))
    other.restore(env.snapshot(), KEY)
    assert other.present.tolist() == [True, True]
    for each in (env, other):
        result = each.step(np.zeros(2, np.int64))
        assert result.truncated.tolist() == [True, False]
        assert result.final_obs["state"][0, 2] == 1


def test_the_limit_truncates_who_lives() -> None:
    env = PettingZooEnv(scripted([[Life(0, 2)], [Life(0, 9)]], max_episode_steps=2), 2)
    assert env.spec.max_episode_steps == 2
    env.reset(KEY)
    env.step(np.zeros(2, np.int64))
    result = env.step(np.zeros(2, np.int64))
    assert (result.terminated.tolist(), result.truncated.tolist()) == ([True, False], [False, True])
    assert result.obs["state"][:, 2].tolist() == [0, 0]
    assert env.present.all()


def test_the_environments_own_limit_is_in_the_spec() -> None:
    def limit(**options: Any) -> int | None:
        return PettingZooEnv(PettingZooConfig(**options), 3).spec.max_episode_steps

    assert limit() == 25
    assert limit(kwargs={"max_cycles": 40}) == 40
    assert limit(max_episode_steps=10) == 10
    assert PettingZooEnv(scripted(THREE), 3).spec.max_episode_steps == 1000


def expected_rows(
    lives: list[list[Life]], row: int, actions: list[Any], limit: int
) -> list[tuple[Any, ...]]:
    """What one row lives through, from the script alone: (seen, reward, ended, cut, last seen)."""
    slot, first = row % len(lives), row - row % len(lives)
    steps: list[tuple[Any, ...]] = []
    start = episode = 0
    while start < len(actions):
        seed = int(KEY.episode(first, episode).integers(2**31))
        length = 1
        while length < limit and any(
            life.enters <= length < life.leaves for own in lives for life in own
        ):
            length += 1
        for time in range(1, min(length, len(actions) - start) + 1):
            life = next((one for one in lives[slot] if one.enters < time <= one.leaves), None)
            if life is None:
                continue
            here = time == life.leaves
            ended = here and life.end in ("terminated", "both", "listed")
            cut = (here or time == length) and not ended
            last = time - 1 if here and life.end == "blind" else time
            steps.append(
                (
                    observed(slot, seed, time - 1).tolist(),
                    paid(time, actions[start + time - 1][row]),
                    ended,
                    cut,
                    observed(slot, seed, last).tolist() if ended or cut else None,
                )
            )
        start, episode = start + length, episode + 1
    return steps


def played_rows(env: PettingZooEnv, actions: list[Any]) -> list[list[tuple[Any, ...]]]:
    """What every row lives through, from what the environment gives."""
    rows: list[list[tuple[Any, ...]]] = [[] for _ in range(env.num_envs)]
    obs, present = env.reset(KEY)["state"], env.present
    for action in actions:
        result = env.step(action)
        finals = dict(zip(result.final_envs.tolist(), result.final_obs["state"], strict=True))
        assert present[result.final_envs].all()
        assert not result.reward[~present].any()
        assert not result.obs["state"][~env.present].any()
        for row in np.flatnonzero(present):
            ended, cut = bool(result.terminated[row]), bool(result.truncated[row])
            last = finals[row].tolist() if row in finals else None
            rows[row].append((obs[row].tolist(), float(result.reward[row]), ended, cut, last))
        obs, present = result.obs["state"], env.present
    return rows


@st.composite
def agent_lives(draw: st.DrawFn, first: bool) -> list[Life]:
    """Up to two lives of one agent; the first agent is there from the start."""
    lives: list[Life] = []
    time = 0
    for i in range(draw(st.integers(1 if first else 0, 2))):
        enters = time + (0 if first and i == 0 else draw(st.integers(0, 3)))
        leaves = enters + draw(st.integers(1, 4))
        lives.append(Life(enters, leaves, draw(st.sampled_from(ENDS))))
        # One who ended cannot be seen to come back in the same step.
        time = leaves + 1
    return lives


@settings(max_examples=80)
@given(
    st.integers(0, 3).flatmap(
        lambda n: st.tuples(agent_lives(True), *(agent_lives(False) for _ in range(n)))
    ),
    st.booleans(),
    st.integers(1, 12),
)
def test_every_living_step_appears_once_in_its_agents_row(
    script: tuple[list[Life], ...], box: bool, limit: int
) -> None:
    lives = list(script)
    env = PettingZooEnv(scripted(lives, box=box, max_episode_steps=limit), 2 * len(lives))
    actions = random_actions(env, 25)
    start = 0 if box else 1
    found = played_rows(env, actions)
    for row in range(env.num_envs):
        expected = expected_rows(lives, row, [a + start for a in actions], limit)
        as_stored = [(seen, float(np.float32(pay)), *rest) for seen, pay, *rest in expected]
        assert found[row] == as_stored


def test_contract_of_simple_spread() -> None:
    config = PettingZooConfig()
    check_contract(
        lambda rows, threads: PettingZooEnv(config, rows, threads),
        steps=50,
        exact_steps=100,
        agents=3,
    )


@pytest.mark.parametrize("box", [False, True])
def test_contract_with_agents_that_come_and_go(box: bool) -> None:
    lives = [[Life(0, 2), Life(4, 6)], [Life(0, 7, "both")], [Life(1, 3, "blind")]]
    config = scripted(lives, box=box)
    check_contract(
        lambda rows, threads: PettingZooEnv(config, rows, threads),
        steps=100,
        exact_steps=200,
        agents=3,
    )
    assert config.exactness().exact


class Haunted(PettingZooEnv):
    """Absent rows that are rewarded, end, or see something."""

    def __init__(self, config: PettingZooConfig, num_envs: int, part: str) -> None:
        super().__init__(config, num_envs)
        self.part = part

    def step(self, actions: Array) -> StepResult:
        before = self.present
        result = super().step(actions)
        if self.part == "obs":
            result.obs["state"][~self.present] = 1
        else:
            getattr(result, self.part)[~before] = 1
        result.final_envs = np.flatnonzero(result.terminated | result.truncated)
        result.final_obs = {"state": np.ones((len(result.final_envs), 3), np.float32)}
        return result


@pytest.mark.parametrize(
    ("part", "item"), [("reward", REWARDS), ("truncated", ENDINGS), ("obs", OBSERVATIONS)]
)
def test_the_contract_notices_what_comes_from_absent_rows(part: str, item: str) -> None:
    config = scripted(THREE)
    found = check_env(lambda rows, _: Haunted(config, rows, part), 20, 20, agents=3)
    assert [f.item for f in found if f.verdict == "failed" and "absent" in f.problem] == [item]


@pytest.mark.parametrize("kwargs", [{}, {"continuous_actions": True}])
def test_simple_spread_goes_on_bit_for_bit_in_a_fresh_instance(kwargs: dict[str, Any]) -> None:
    config = PettingZooConfig(kwargs=kwargs)
    verdict = config.exactness()
    assert verdict.exact, verdict.reason
    env, fresh = PettingZooEnv(config, 6), PettingZooEnv(config, 6)
    env.reset(KEY)
    play(env, random_actions(env, 33))
    snapshot = env.snapshot()
    before = digest(snapshot)
    actions = random_actions(env, 200, seed=1)
    expected = play(env, actions)
    assert digest(snapshot) == before
    fresh.restore(snapshot, KEY)
    assert play(fresh, actions) == expected
    assert digest(fresh.snapshot()) == digest(env.snapshot())


def test_steps_equal_those_of_the_bare_environment() -> None:
    from mpe2 import simple_spread_v3

    env, bare = PettingZooEnv(PettingZooConfig(), 6), simple_spread_v3.parallel_env()
    obs, episode = env.reset(KEY)["state"], 0
    seen: Any = bare.reset(seed=int(KEY.episode(3, 0).integers(2**31)))[0]
    for action in random_actions(env, 60):
        assert (
            obs[3:].tobytes() == np.stack([seen[name] for name in bare.possible_agents]).tobytes()
        )
        result = env.step(action)
        seen, paid_to, _, cut, _ = bare.step(
            dict(zip(bare.agents[:], action[3:].tolist(), strict=True))
        )
        assert result.reward[3:].tolist() == [np.float32(x) for x in paid_to.values()]
        assert result.truncated[3:].tolist() == list(cut.values())
        if not bare.agents:
            last = result.final_obs["state"][result.final_envs >= 3]
            assert last.tobytes() == np.stack(list(seen.values())).tobytes()
            episode += 1
            seen = bare.reset(seed=int(KEY.episode(3, episode).integers(2**31)))[0]
        obs = result.obs["state"]
    assert episode == 2


def test_specs_and_names() -> None:
    spec = PettingZooEnv(PettingZooConfig(), 3).spec
    assert spec.action == ActionSpec("discrete", sizes=(5,))
    assert spec.observations == {"state": ArraySpec((18,))}
    assert spec.agents == PettingZooConfig().num_agents == 3
    assert PettingZooConfig(kwargs={"N": 5}).num_agents == 5
    assert env_config("mpe2.simple_spread_v3", {"N": 2}) == PettingZooConfig(kwargs={"N": 2})


def test_one_that_cannot_be_saved_trains_and_begins_again() -> None:
    config = scripted([[Life(0, 40)]], name="Hidden")
    verdict = config.exactness()
    assert not verdict.exact
    assert "state that is not in its snapshot" in verdict.reason
    env = PettingZooEnv(config, 2)
    env.reset(KEY)
    env.step(np.zeros(2, np.int64))
    assert env.snapshot() == {}
    env.restore({}, Key(3))
    assert env.present.all()
    assert env.step(np.zeros(2, np.int64)).obs["state"][0, 2] < 2


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({}, 64, r"envs_per_group 64 is not a multiple of the 3 agents of '.*': 63 or 66"),
        ({}, 2, "multiple of the 3 agents of '.*': 3 would fit"),
        ({"parallel": "mpe2.simple_tag_v3"}, 4, "'adversary_0' and 'agent_0' observe different"),
        ({"parallel": "mpe2.simple_spred_v3"}, 3, "Nearest: mpe2.simple_spread_v3"),
        ({"parallel": "no_such_v3"}, 3, "no module 'no_such_v3'"),
        ({"parallel": "mpe2.simple_spread_v3:env"}, 3, "give its parallel_env"),
        ({"parallel": "json"}, 3, "json has no parallel_env"),
        ({"parallel": "json:loads"}, 3, "does not take these arguments"),
        ({"parallel": "types:SimpleNamespace"}, 3, "lacks possible_agents, reset"),
        ({"parallel": "sys:path"}, 3, "cannot be called"),
        ({"kwargs": {"colour": "red"}}, 3, "does not take these arguments"),
        ({"kwargs": {"local_ratio": 7.0}}, 3, "cannot be made: AssertionError: local_ratio"),
    ],
)
def test_mistakes_end_in_one_sentence(options: Any, rows: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PettingZooEnv(PettingZooConfig(**options), rows)


@pytest.mark.parametrize("package", ["mpe2", "pettingzoo"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import pettingzoo\nparallel_env = pettingzoo.ParallelEnv\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Nowhere:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name == package:
                raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    name = "mpe2.simple_spread_v3" if package == "mpe2" else f"{file}:parallel_env"
    with pytest.raises(UsageError, match=rf"'{package}': pip install 'etude\[multiagent\]'"):
        PettingZooEnv(PettingZooConfig(parallel=name), 3)


def test_an_agent_that_breaks_the_interface_is_named() -> None:
    env = PettingZooEnv(scripted([[Life(0, 9)], [Life(0, 9)]]), 2)
    env.reset(KEY)
    inner: Any = env._envs[0]
    inner.seen = lambda names: {}
    with pytest.raises(UsageError, match="agent 'agent 0' in `agents`"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(UsageError, match="no agents after a reset"):
        PettingZooEnv(scripted([[Life(1, 2)]]), 1).reset(KEY)


def test_a_snapshot_of_other_size_is_refused() -> None:
    config = scripted([[Life(0, 9)], [Life(0, 9)]])
    two, four = PettingZooEnv(config, 2), PettingZooEnv(config, 4)
    two.reset(KEY)
    with pytest.raises(UsageError, match="2 rows, and the environment 4"):
        four.restore(two.snapshot(), KEY)
