"""A rollout is a pure function of weights, snapshot, key and iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from etude.core.contracts import Action, ActionSpec, Array, Fragment, Snapshot
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays, digest
from etude.envs.reach import Reach, ReachConfig
from etude.experience.segments import SegmentBuffer
from etude.models.policies import PolicyConfig, make_policy
from etude.rollout.group import Group, OpenEpisodes, evaluate, moments, restart
from toys import ACTIONS, BOX, ToyEnv, fragment_bits, toy_policy

ROWS, STEPS, KEY = 3, 11, Key(9, ("group", 0))


def empty(env: Any, steps: int = STEPS) -> Fragment:
    return SegmentBuffer(env.spec, env.num_rows, steps).part(slice(0, env.num_rows))


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
    env = Reach(ReachConfig(), 4)
    policy = make_policy(PolicyConfig(), env.spec, Key(1))
    group = Group(env)
    first = group.begin(policy, KEY)
    saved = copy_arrays(first)
    _, middle = group.rollout(policy, first, KEY, 0, empty(env, 30))
    held, end = group.rollout(policy, middle, KEY, 1, empty(env, 30))
    other = Group(Reach(ReachConfig(), 4, threads=2))
    _, again = other.rollout(policy, saved, KEY, 0, empty(env, 30))
    found, other_end = Group(Reach(ReachConfig(), 4)).rollout(
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
            for k, row in enumerate(answer.final_rows):
                finals.append((int(row), t, answer.final_obs["state"][k].tolist()))
                level = float(answer.episodes["level"][k])
                episodes.append((returns[row], lengths[row], level))
                returns[row] = lengths[row] = 0.0
            obs = answer.obs["state"]
        assert part.last_obs["state"].tolist() == obs.tolist()
        found = zip(*(part.finals.rows, part.finals.steps), strict=True)
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
    result.final_rows, result.episodes = np.zeros(0, np.int64), {}
    result.reward = np.array([0.1], np.float32)
    for _ in range(1000):
        open_episodes.add(result)
    assert open_episodes.returns[0] == pytest.approx(1000 * float(np.float32(0.1)), rel=1e-12)
    assert open_episodes.lengths[0] == 1000


class Counting:
    """A policy whose recurrent state counts the steps of an episode; it acts by that count."""

    def noise(self, generator: np.random.Generator, steps: int, rows: int) -> Array:
        return np.zeros((steps, rows, 2), np.float32)

    def initial_state(self, rows: int) -> Tree:
        return {"steps": torch.zeros(rows), "more": torch.full((rows, 2), 5.0)}

    def act(self, obs: dict[str, torch.Tensor], state: Tree, noise: torch.Tensor | None) -> Any:
        count = state["steps"]
        actions = torch.stack([count, count], dim=1) / 100
        after = {"steps": count + 1, "more": state["more"] + 1}
        return Action(actions, torch.zeros(len(count)), after)

    def state_dict(self) -> Tree:
        return {}

    def load_state_dict(self, state: Tree) -> None: ...


def test_restart_touches_the_given_rows_alone() -> None:
    state = {"steps": torch.arange(4.0), "more": torch.zeros(4, 2)}
    after = restart(state, Counting(), np.array([1, 3]))
    assert after["steps"].tolist() == [0, 0, 2, 0]
    assert after["more"][:, 0].tolist() == [0, 5, 0, 5]
    assert state["steps"].tolist() == [0, 1, 2, 3]
    assert restart({}, Counting(), np.array([1])) == {}


def test_recurrent_state_begins_again_with_every_episode() -> None:
    env, policy = ToyEnv(ROWS), Counting()
    group = Group(env)
    snapshot = group.begin(policy, KEY)
    for iteration in range(3):  # and it is carried from one rollout to the next
        part, snapshot = group.rollout(policy, snapshot, KEY, iteration, empty(env))
        elapsed = part.obs["state"][:, :, 0]
        np.testing.assert_allclose(part.actions[:, :, 0] * 100, elapsed, atol=1e-4)


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
        for k, row in enumerate(result.final_rows):
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
