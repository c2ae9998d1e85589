"""A new round of the curriculum: every row begins anew, and a rollout stays a pure function."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from etude.core.contracts import Broadcast, Fragment, Snapshot
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import Tree, copy_arrays, digest
from etude.data.segments import BufferSpec, SegmentBuffer, fill
from etude.data.store.episodes import EpisodeStore, StoreGeometry
from etude.data.store.geometry import store_specs
from etude.envs.config import Episodic
from etude.models.actor_critic import ActorCritic
from etude.models.policies import PolicyConfig, make_policy
from etude.rollout.group import Group
from etude.rollout.local import OverlappedCollector
from etude.runs.files import Disk
from etude.tasks.reach import ReachConfig
from etude.tasks.seek import Seek
from toy_envs import LONGEST, MotionEnv, ToyEnv
from toys import Trainer, fragment_bits, make_trainer

ROWS, STEPS, KEY = 4, 10, Key(9, ("group", 0))
LSTM = PolicyConfig(kind="lstm", hidden=(8,), units=6)


def curriculum(number: int, *weights: float) -> Tree:
    return {"round": number, "weights": np.array(weights or (0.2, 0.3, 0.5))}


def policy_for(env: Any) -> ActorCritic:
    return make_policy(LSTM, env.spec, Key(1))


def play(group: Group, snapshot: Snapshot, iteration: int) -> tuple[Fragment, Snapshot]:
    policy = policy_for(group.env)
    contents = BufferSpec(group.env.spec, policy.state_specs, ROWS, STEPS, STEPS // 2)
    part = SegmentBuffer(contents).part(slice(0, ROWS))
    return group.rollout(policy, snapshot, KEY, iteration, part)


def begun(env: Any) -> tuple[Group, Snapshot]:
    group = Group(env)
    group.follow(curriculum(0))
    return group, group.begin(policy_for(env), KEY)


def test_rows_begin_anew_with_the_next_episode_and_the_new_weights() -> None:
    group, first = begun(MotionEnv(ROWS))
    one, before = play(group, first, 0)
    assert not one.restarted.any()
    assert before["open"]["lengths"].any()
    group.follow(curriculum(1, 0.0, 0.0, 1.0))
    two, after = play(group, before, 1)
    assert two.restarted.all()
    start = two.obs["state"][:, 0]  # steps so far, episode, motion, last action
    assert (start[:, 0] == 0).all()
    assert (start[:, 1] == before["env"]["episode"] + 1).all()
    assert (start[:, 2] == 2).all()
    assert (start[:, 3] == 0).all()
    assert all((state[:, 0] == 0).all() for state in two.states.values())
    # Episodes that were cut are neither reported nor counted into the next ones.
    for row, step, length in zip(*two.finals[:2], two.episodes["length"], strict=True):
        earlier = [s for r, s in zip(*two.finals[:2], strict=True) if r == row and s < step]
        assert length == step - max(earlier, default=-1)
    assert len(two.episodes["motion"])
    assert (two.episodes["motion"] == 2).all()
    assert after["round"] == 1
    again, _ = play(group, after, 2)  # the same round goes on
    assert not again.restarted.any()
    assert again.obs["state"].tobytes() != two.obs["state"].tobytes()


def test_a_rollout_over_a_new_round_is_pure() -> None:
    group, first = begun(MotionEnv(ROWS))
    _, snapshot = play(group, first, 0)
    saved = copy_arrays(snapshot)
    group.follow(curriculum(1))
    held, after_held = play(group, snapshot, 1)
    restored, after_restored = play(group, copy_arrays(saved), 1)
    other = Group(MotionEnv(ROWS))
    other.follow(curriculum(7))
    other.begin(policy_for(other.env), KEY.child("another past"))
    other.follow(curriculum(1))
    elsewhere, after_elsewhere = play(other, copy_arrays(saved), 1)
    assert fragment_bits(held) == fragment_bits(restored) == fragment_bits(elsewhere)
    assert digest(after_held) == digest(after_restored) == digest(after_elsewhere)
    assert digest(snapshot) == digest(saved)
    # And back: an older round on the same instance, as after the loss of a worker.
    group.follow(curriculum(0))
    back, _ = play(group, copy_arrays(saved), 1)
    assert not back.restarted.any()
    assert fragment_bits(back) != fragment_bits(held)


def test_a_snapshot_without_a_round_is_in_the_first() -> None:
    group, first = begun(MotionEnv(ROWS))
    old = {name: part for name, part in copy_arrays(first).items() if name != "round"}
    assert fragment_bits(play(group, first, 0)[0]) == fragment_bits(play(group, old, 0)[0])


def test_an_environment_that_cannot_restart_says_so() -> None:
    group, first = begun(ToyEnv(ROWS))
    group.follow(curriculum(1))
    with pytest.raises(UsageError, match="restart"):
        play(group, first, 0)


@pytest.mark.parametrize("make", [lambda: ReachConfig().build(ROWS), lambda: Seek(ROWS)])
def test_shipped_tasks_restart_as_if_their_episodes_had_ended(make: Any) -> None:
    env, other = make(), make()
    for each in (env, other):
        each.reset(Key(3))
    env.step(np.zeros((ROWS, len(env.spec.action.low)), np.float32))
    obs = env.restart()
    assert (env.snapshot()["episode"] == 1).all()
    snapshot = other.snapshot()
    assert obs["state"].tobytes() == other.restart()["state"].tobytes()  # no trace of the step
    assert digest(env.snapshot()) == digest(other.snapshot()) != digest(snapshot)


def test_a_task_in_numpy_may_have_motions() -> None:
    class Moving(Seek):
        motions = ("walk", "run")

    assert Moving(ROWS).spec.motions == ("walk", "run")
    assert Seek(ROWS).spec.motions == ()


def test_held_back_rewards_of_a_cut_episode_are_dropped() -> None:
    env = Episodic(MotionEnv(ROWS))
    env.reset(Key(3))
    env.step(np.ones((ROWS, 2), np.float32))
    env.restart()
    assert not env.snapshot()["earned"].any()


def make_rounds(threads: int = 1) -> Trainer:
    envs = [MotionEnv(2) for _ in range(4)]
    return make_trainer(
        envs=envs, policy=LSTM, horizon=4, minibatch=128, threads=threads, learning_rate=0.01
    )


def collect(trainer: Trainer, number: int) -> list[Fragment]:
    plain = trainer.ppo.broadcast(trainer.clock)
    sent = Broadcast(plain.version, plain.policy, curriculum(number))
    return trainer.collector.collect(sent, trainer.clock.now.iterations)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_trains_is_what_acted_across_a_new_round(threads: int) -> None:
    trainer, reference, bits = make_rounds(threads), make_rounds(), []
    for number in (0, 0, 1, 1, 2):
        fragments = collect(trainer, number)
        assert all(
            (f.restarted == (trainer.clock.now.iterations in (2, 4))).all() for f in fragments
        )
        bits.append([fragment_bits(f) for f in fragments])
        assert bits[-1] == [fragment_bits(f) for f in collect(reference, number)]
        for each, collected in ((trainer, fragments), (reference, fragments)):
            each.ppo.ingest(collected, each.clock)
        for shard in trainer.ppo.shards:
            assert shard.memory is not None
            judged = trainer.ppo.policy.evaluate(shard.features, shard.actions, shard.memory)
            worst = float((judged.log_probs - shard.log_probs).abs().max().detach())
            assert worst <= 1e-5
        for each in (trainer, reference):
            each.update()
            each.ppo.end_iteration()
            each.clock.advance(1, 0)


def test_running_returns_do_not_go_on_across_a_new_round() -> None:
    trainer = make_rounds()
    trainer.ppo.ingest(collect(trainer, 0), trainer.clock)
    trainer.clock.advance(1, 0)
    running = trainer.ppo.scaler.running.copy()
    assert running.any()
    fragments = collect(trainer, 1)
    trainer.ppo.scaler.running[:] = 1e9  # Would show, if it counted.
    trainer.ppo.ingest(fragments, trainer.clock)
    assert np.abs(trainer.ppo.scaler.running).max() < 1e3


def test_a_group_that_restarts_alone_leaves_the_returns_of_the_others() -> None:
    """A worker that was lost may bring one group of a shard back at an episode's start."""
    trainer = make_rounds()
    trainer.ppo.ingest(collect(trainer, 0), trainer.clock)
    trainer.clock.advance(1, 0)
    fragments = collect(trainer, 0)
    for fragment in fragments:
        fragment.terminated[...] = fragment.truncated[...] = False
        fragment.rewards[...] = 0.0
    fragments[1].restarted[...] = True
    trainer.ppo.scaler.running[:] = 1e9
    trainer.ppo.ingest(fragments, trainer.clock)
    kept = trainer.ppo.scaler.running > 1.0
    assert kept.tolist() == [True, True, False, False, True, True, True, True]


def test_a_fragment_from_elsewhere_keeps_what_it_says_of_a_restart() -> None:
    """Copied to its place it is the same in every field: a field that is left out would let
    workers on other machines give other bits than threads."""
    trainer = make_rounds()
    (fragment, *_) = collect(trainer, 1)
    fragment.restarted[...] = [True, False]
    target = trainer.ppo.buffers[0].part(slice(2, 4))
    fill(target, fragment)
    assert fragment_bits(target) == fragment_bits(fragment)
    assert target.restarted.tolist() == [True, False]
    names = {f.name for f in fields(Fragment)}
    assert all(getattr(target, name) is not getattr(fragment, name) for name in names)


def test_one_iteration_ahead_too() -> None:
    """With lag 1 a round takes effect one iteration later, also after a resume in between."""

    def make() -> OverlappedCollector:
        return OverlappedCollector(make_rounds().collector, lambda i: i < 5)

    weights = make_rounds().ppo.broadcast(make_rounds().clock).policy
    rounds = (0, 0, 1, 1, 2)

    def collected(collector: OverlappedCollector, i: int) -> list[tuple[bool, str]]:
        fragments = collector.collect(Broadcast(i, weights, curriculum(rounds[i])), i)
        return [(bool(f.restarted.all()), fragment_bits(f)) for f in fragments]

    whole = make()
    expected = [collected(whole, i) for i in range(5)]
    whole.close()
    assert [part[0][0] for part in expected] == [False, False, False, True, False]
    for stop in range(1, 5):
        first, second = make(), make()
        for i in range(stop):
            collected(first, i)
        second.load_state_dict(copy_arrays(first.state_dict()))
        assert [collected(second, i) for i in range(stop, 5)] == expected[stop:]
        first.close()
        second.close()


def test_an_episode_store_refuses_what_does_not_continue(tmp_path: Any) -> None:
    group, snapshot = begun(MotionEnv(ROWS))
    geometry = StoreGeometry(store_specs(group.env.spec), ROWS, LONGEST)
    store = EpisodeStore.create(tmp_path / "store", geometry, Disk())
    one, snapshot = play(group, snapshot, 0)
    store.append([one])
    group.follow(curriculum(1))
    two, _ = play(group, snapshot, 1)
    two.restarted[:] = False  # Says that it goes on, and does not.
    with pytest.raises(ValueError, match="does not continue"):
        store.append([two])
    before = store.num_episodes
    two.restarted[:] = True
    store.append([two])
    assert store.num_episodes >= before + ROWS  # The open ones were closed.
