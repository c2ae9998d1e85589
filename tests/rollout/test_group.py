"""A rollout is a pure function of weights, snapshot, key and iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import Action, ActionSpec, Array, ArraySpec, Fragment, Snapshot
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays, digest
from etude.data.segments import BufferSpec, SegmentBuffer
from etude.models.policies import PolicyConfig, make_policy
from etude.rollout.group import Group, OpenEpisodes, evaluate, moments, restart
from etude.tasks.reach import ReachConfig
from toy_envs import ACTIONS, BOX, LONGEST, ToyEnv, VanishingEnv
from toys import fragment_bits, toy_buffer, toy_policy

ROWS, STEPS, KEY = 3, 11, Key(9, ("group", 0))


def empty(env: Any, steps: int = STEPS) -> Fragment:
    return toy_buffer(env.spec, env.num_envs, steps).part(slice(0, env.num_envs))


def empty_for(policy: Any, env: Any, steps: int, horizon: int) -> Fragment:
    contents = BufferSpec(env.spec, policy.state_specs, env.num_envs, steps, horizon)
    return SegmentBuffer(contents).part(slice(0, env.num_envs))


def play(group: Group, snapshot: Snapshot, iteration: int) -> tuple[Fragment, Snapshot]:
    policy = toy_policy(group.env)  # type: ignore[arg-type]
    return group.rollout(policy, snapshot, KEY, iteration, empty(group.env))


@pytest.mark.parametrize("kind", ACTIONS)
def test_the_same_question_has_the_same_answer(kind: str) -> None:
    def fresh() -> Group:
        return Group(ToyEnv(ROWS, ACTIONS[kind]))

    group = fresh()
    snapshot = group.begin(toy_policy(group.env), KEY)  # type: ignore[arg-type]
    saved = copy_arrays(snapshot)
    held, after_held = play(group, snapshot, 4)  # from where the environment stands
    restored, after_restored = play(group, copy_arrays(saved), 4)  # put back
    elsewhere, after_elsewhere = play(fresh(), copy_arrays(saved), 4)  # another instance
    assert fragment_bits(held) == fragment_bits(restored) == fragment_bits(elsewhere)
    assert digest(after_held) == digest(after_restored) == digest(after_elsewhere)
    assert digest(snapshot) == digest(saved)  # what was handed in is not changed
    assert fragment_bits(play(group, copy_arrays(saved), 5)[0]) != fragment_bits(held)


def test_a_chain_of_held_rollouts_equals_a_chain_of_restored_ones() -> None:
    one, snapshots = Group(ToyEnv(ROWS)), []
    snapshot = one.begin(toy_policy(ToyEnv(ROWS)), KEY)
    for i in range(4):
        fragment, snapshot = play(one, snapshot, i)
        snapshots.append((fragment_bits(fragment), digest(snapshot)))
    other = Group(ToyEnv(ROWS)).begin(toy_policy(ToyEnv(ROWS)), KEY)
    for i in range(4):
        fragment, other = play(Group(ToyEnv(ROWS)), copy_arrays(other), i)
        assert (fragment_bits(fragment), digest(other)) == snapshots[i]


def test_reach_is_pure_too() -> None:
    env = ReachConfig().build(4)
    policy = make_policy(PolicyConfig(), env.spec, Key(1))
    group = Group(env)
    first = group.begin(policy, KEY)
    saved = copy_arrays(first)
    _, middle = group.rollout(policy, first, KEY, 0, empty(env, 30))
    held, end = group.rollout(policy, middle, KEY, 1, empty(env, 30))
    other = Group(ReachConfig().build(4, threads=2))
    _, again = other.rollout(policy, saved, KEY, 0, empty(env, 30))
    found, other_end = Group(ReachConfig().build(4)).rollout(
        policy, copy_arrays(again), KEY, 1, empty(env, 30)
    )
    assert fragment_bits(found) == fragment_bits(held)
    assert digest(other_end) == digest(end)


def test_weights_that_differ_give_another_fragment() -> None:
    env = ToyEnv(ROWS)
    group = Group(env)
    snapshot = copy_arrays(group.begin(toy_policy(env), KEY))
    one = group.rollout(toy_policy(env, 0), copy_arrays(snapshot), KEY, 0, empty(env))[0]
    two = group.rollout(toy_policy(env, 1), copy_arrays(snapshot), KEY, 0, empty(env))[0]
    assert fragment_bits(one) != fragment_bits(two)


@pytest.mark.parametrize("kind", ACTIONS)
def test_a_fragment_holds_what_happened(kind: str) -> None:
    """Replayed on an environment of its own, action by action."""
    env = ToyEnv(ROWS, ACTIONS[kind])
    policy, group = toy_policy(env), Group(env)
    snapshot = group.begin(policy, KEY)
    replay = ToyEnv(ROWS, ACTIONS[kind])
    obs = replay.reset(KEY.child("env"))["state"]
    returns, lengths = np.zeros(ROWS), np.zeros(ROWS)
    for iteration in range(3):
        part, snapshot = group.rollout(policy, snapshot, KEY, iteration, empty(env))
        finals: list[tuple[int, int, list[float]]] = []
        episodes: list[tuple[float, float, float]] = []
        seen = []
        for t in range(STEPS):
            assert part.obs["state"][:, t].tolist() == obs.tolist()
            seen.append(obs)
            answer = replay.step(env.spec.action.to_env(part.actions[:, t]))
            assert part.rewards[:, t].tolist() == answer.reward.tolist()
            assert part.terminated[:, t].tolist() == answer.terminated.tolist()
            assert part.truncated[:, t].tolist() == answer.truncated.tolist()
            returns, lengths = returns + answer.reward, lengths + 1
            for k, row in enumerate(answer.final_envs):
                finals.append((int(row), t, answer.final_obs["state"][k].tolist()))
                level = float(answer.episodes["level"][k])
                episodes.append((returns[row], lengths[row], level))
                returns[row] = lengths[row] = 0.0
            obs = answer.obs["state"]
        assert part.last_obs["state"].tolist() == obs.tolist()
        found = zip(*(part.finals.envs, part.finals.steps), strict=True)
        assert [(int(r), int(s)) for r, s in found] == [(r, s) for r, s, _ in finals]
        assert part.finals.obs["state"].tolist() == [final for _, _, final in finals]
        names = ("return", "length", "level")
        assert np.stack([part.episodes[n] for n in names], 1).tolist() == [
            list(map(float, episode)) for episode in episodes
        ]
        everything = np.stack(seen).reshape(-1, 4).astype(np.float64)
        np.testing.assert_allclose(part.moments["state"]["mean"], everything.mean(0), atol=1e-12)
        np.testing.assert_allclose(
            part.moments["state"]["m2"] / len(everything), everything.var(0), atol=1e-12
        )
        with torch.no_grad():
            judged = policy.evaluate(
                policy.prepare({"state": torch.from_numpy(part.obs["state"])}),
                torch.from_numpy(part.actions),
                None,
            )
        np.testing.assert_allclose(judged.log_probs, part.log_probs, atol=1e-5)
    assert snapshot["open"]["returns"].tolist() == pytest.approx(returns.tolist())
    assert snapshot["open"]["lengths"].tolist() == lengths.tolist()


def test_a_rollout_without_a_finished_episode() -> None:
    env = ToyEnv(ROWS)
    group = Group(env)
    snapshot = group.begin(toy_policy(env), KEY)
    snapshot["env"]["length"][:] = 100
    part, _ = group.rollout(toy_policy(env), copy_arrays(snapshot), KEY, 0, empty(env, 2))
    assert part.finals.obs["state"].shape == (0, 4)
    shapes = {name: values.shape for name, values in part.episodes.items()}
    assert shapes == dict.fromkeys(("return", "length", "is_success", "level"), (0,))


def test_open_episodes_count_in_double_precision() -> None:
    open_episodes, env = OpenEpisodes(1), ToyEnv(1)
    env.reset(KEY)
    result = env.step(np.zeros((1, 2), np.float32))
    result.final_envs, result.episodes = np.zeros(0, np.int64), {}
    result.reward = np.array([0.1], np.float32)
    for _ in range(1000):
        open_episodes.add(result, None)
    assert open_episodes.returns[0] == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)
    assert open_episodes.lengths[0] == 1000


class Counting:
    """A policy whose recurrent state counts the steps of an episode; it acts by that count."""

    def noise(self, generator: np.random.Generator, steps: int, rows: int) -> Array:
        return np.zeros((steps, rows, 2), np.float32)

    def log_probs(self, noise: torch.Tensor) -> None:
        return None

    observations = actor_observations = {"state": ArraySpec((4,))}  # noqa: RUF012
    state_specs = {"steps": ArraySpec(()), "more": ArraySpec((2,))}  # noqa: RUF012

    def initial_state(self, rows: int) -> dict[str, Array]:
        return {"steps": np.zeros(rows, np.float32), "more": np.full((rows, 2), 5.0, np.float32)}

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Any:
        count = state["steps"]
        actions = torch.stack([count, count], dim=1) / 100
        after = {"steps": count + 1, "more": state["more"] + 1}
        return Action(actions, torch.zeros(len(count)), after)

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None: ...


def test_restart_touches_the_given_rows_alone() -> None:
    state = {"steps": np.arange(4.0), "more": np.zeros((4, 2))}
    restart(state, Counting(), np.array([1, 3]))
    assert state["steps"].tolist() == [0, 0, 2, 0]
    assert state["more"][:, 0].tolist() == [0, 5, 0, 5]


def test_recurrent_state_begins_again_with_every_episode() -> None:
    env, policy = ToyEnv(ROWS), Counting()
    group = Group(env)
    snapshot = group.begin(policy, KEY)
    for iteration in range(3):  # and it is carried from one rollout to the next
        out = empty_for(policy, env, 12, horizon=4)
        part, snapshot = group.rollout(policy, snapshot, KEY, iteration, out)
        elapsed = part.obs["state"][:, :, 0]
        np.testing.assert_allclose(part.actions[:, :, 0] * 100, elapsed, atol=1e-4)
        # What a segment began with, what the last observation and every final one were met with.
        np.testing.assert_allclose(part.states["steps"], elapsed[:, ::4], atol=1e-4)
        np.testing.assert_allclose(part.states["more"][..., 1], 5 + elapsed[:, ::4], atol=1e-4)
        last = part.last_obs["state"][:, 0]
        np.testing.assert_allclose(part.last_state["steps"], last, atol=1e-4)
        ended = part.finals.obs["state"][:, 0]
        assert len(ended)
        np.testing.assert_allclose(part.finals.state["steps"], ended, atol=1e-4)


def test_recurrent_state_begins_again_with_those_who_come() -> None:
    env, policy = VanishingEnv(ROWS, garbage=50.0), Counting()
    group = Group(env)
    snapshot = group.begin(policy, KEY)
    for iteration in range(4):
        out = empty_for(policy, env, 12, horizon=3)
        part, snapshot = group.rollout(policy, snapshot, KEY, iteration, out)
        elapsed, there = part.obs["state"][:, :, 0], part.present
        assert 0 < there.sum() < there.size
        assert (elapsed[~there] == 50.0).all()
        np.testing.assert_allclose(part.actions[there][:, 0] * 100, elapsed[there], atol=1e-4)
        starts = there[:, ::3]
        found, expected = part.states["steps"][starts], elapsed[:, ::3][starts]
        np.testing.assert_allclose(found, expected, atol=1e-4)
        now = env.present
        last = part.last_obs["state"][now, 0]
        np.testing.assert_allclose(part.last_state["steps"][now], last, atol=1e-4)
        ended = part.finals.obs["state"][:, 0]
        np.testing.assert_allclose(part.finals.state["steps"], ended, atol=1e-4)
        # An episode is as long as its agent was there.
        assert part.episodes["length"].tolist() == ended.tolist()


class InPlace(VanishingEnv):
    """One that keeps its `present` in the same array for good."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(num_envs)
        self._mask = np.zeros(num_envs, np.bool_)

    @property
    def present(self) -> Array:
        self._mask[:] = super().present
        return self._mask


def test_who_is_there_may_be_told_in_place() -> None:
    policy = toy_policy(ToyEnv(1))
    one, two = (evaluate(make(ROWS), policy, 3, KEY) for make in (VanishingEnv, InPlace))
    assert digest(one) == digest(two)
    found = []
    for env in (VanishingEnv(ROWS), InPlace(ROWS)):
        group, counting = Group(env), Counting()
        part = empty_for(counting, env, 12, horizon=3)
        group.rollout(counting, group.begin(counting, KEY), KEY, 0, part)
        found.append(fragment_bits(part))
    assert found[0] == found[1]


def test_evaluation_ends_though_somebody_never_comes() -> None:
    policy, episodes = toy_policy(ToyEnv(1)), 4
    found = evaluate(VanishingEnv(ROWS, never=1), policy, episodes, KEY)
    assert len(found["return"]) == episodes * (ROWS - 1)
    assert found["length"].min() >= 1
    assert found["length"].max() <= LONGEST
    # The others' episodes are those they have where everyone comes.
    everyone = evaluate(VanishingEnv(ROWS), policy, episodes, KEY)
    assert len(everyone["return"]) == episodes * ROWS
    for name, values in everyone.items():
        others = np.delete(values.reshape(episodes, ROWS), 1, axis=1)
        assert found[name].tolist() == others.reshape(-1).tolist()


def test_evaluation_counts_the_steps_of_those_who_are_there() -> None:
    """By the lengths that the toy itself drew."""
    env = VanishingEnv(ROWS)
    found = evaluate(env, toy_policy(env), 3, KEY)
    drawn = [
        int(KEY.episode(row, episode).integers(1, LONGEST + 1))
        for episode in range(3)
        for row in range(ROWS)
    ]
    assert found["length"].tolist() == drawn


@pytest.mark.parametrize("kind", ACTIONS)
def test_evaluation_counts_every_row_the_same_number_of_episodes(kind: str) -> None:
    action: ActionSpec = ACTIONS[kind]
    policy, episodes = toy_policy(ToyEnv(1, action)), 4
    found = evaluate(ToyEnv(ROWS, action), policy, episodes, KEY)
    # By hand: every row alone, most likely actions, its first four episodes.
    env = ToyEnv(ROWS, action)
    obs, rows = env.reset(KEY), [[] for _ in range(ROWS)]
    returns, lengths = np.zeros(ROWS), np.zeros(ROWS)
    while min(map(len, rows)) < episodes:
        with torch.no_grad():
            tensors = {name: torch.from_numpy(array) for name, array in obs.items()}
            actions = policy.act(tensors, {}, None).actions.numpy()
        result = env.step(action.to_env(actions))
        obs, returns, lengths = result.obs, returns + result.reward, lengths + 1
        for k, row in enumerate(result.final_envs):
            level = result.episodes["level"][k]
            rows[row].append((returns[row], lengths[row], level))
            returns[row] = lengths[row] = 0.0
    expected = [rows[r][e] for e in range(episodes) for r in range(ROWS)]
    assert len(found["return"]) == episodes * ROWS
    np.testing.assert_allclose(found["return"], [e[0] for e in expected], rtol=1e-6)
    assert found["length"].tolist() == [e[1] for e in expected]
    assert found["level"].tolist() == [e[2] for e in expected]
    again = evaluate(ToyEnv(ROWS, action), policy, episodes, KEY)
    assert digest(again) == digest(found)
    assert digest(evaluate(ToyEnv(ROWS, action), policy, episodes, KEY.child(1))) != digest(found)


def test_moments_are_of_all_rows_and_steps() -> None:
    array = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    found, flat = moments(array), array.reshape(-1, 3)
    assert float(found["count"]) == 8.0
    assert found["mean"].tolist() == flat.mean(0).tolist()
    assert found["m2"].tolist() == (flat.var(0) * 8).tolist()
    assert array[0, 0].tolist() == [0.0, 1.0, 2.0]


def test_moments_of_nothing_are_numbers() -> None:
    found = moments(np.zeros((0, 3), np.float32))
    assert float(found["count"]) == 0.0
    assert found["mean"].tolist() == found["m2"].tolist() == [0.0] * 3


def test_actions_reach_the_environment_clipped() -> None:
    env, policy = ToyEnv(2, BOX), toy_policy(ToyEnv(2, BOX))
    with torch.no_grad():
        policy.log_std.fill_(3.0)
    group = Group(env)
    part, _ = group.rollout(policy, group.begin(policy, KEY), KEY, 0, empty(env))
    assert float(np.abs(part.actions).max()) > 1.0  # kept as the policy gave them
    acted = part.rewards[:, :-1] - part.obs["state"][:, :-1, 2]
    assert acted.max() <= 3.0 + 1e-5
    assert acted.min() >= -2.0 - 1e-5
