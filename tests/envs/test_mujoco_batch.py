from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batch_env_contract import KEY, assert_same_bits, check_contract, play, random_actions
from etude.core.errors import NonFinite, UsageError
from etude.core.keys import Streams
from etude.core.trees import digest
from etude.envs.mujoco.randomize import Vary
from etude.envs.mujoco.simulation import Simulation
from etude.envs.mujoco.task import Task
from etude.envs.robots.kuka import kuka_spec
from etude.tasks.reach import ReachConfig


class HeavyReach(ReachConfig):
    """Reach with links whose masses are drawn anew for every episode."""

    def define(self) -> Task:
        heavy = Vary("body", ("body_mass", "body_inertia"), 0.5, each=False)
        return replace(super().define(), parts=[heavy])


def make_simulation(rows: int = 4, threads: int = 1) -> Simulation:
    return Simulation(kuka_spec(fingers="locked").compile(), rows, threads)


def test_contract_with_per_row_model_values() -> None:
    check_contract(lambda rows, threads: HeavyReach().build(rows, threads))


def test_per_row_model_values_are_in_the_snapshot_and_matter() -> None:
    env = HeavyReach().build(3)
    env.reset(KEY)
    model = env.snapshot()["simulation"]["model"]
    assert {"body_mass", "body_inertia", "body_subtreemass"} <= set(model)
    plain = ReachConfig().build(3)
    snapshot = env.snapshot()
    actions = random_actions(env, 5)
    expected = play(env, actions)
    snapshot["simulation"]["model"] = {}
    plain.restore(snapshot, KEY)
    assert play(plain, actions) != expected


def test_restore_brings_shared_values_back_to_the_model() -> None:
    plain, expanded = make_simulation(), make_simulation()
    snapshot = plain.snapshot()
    expanded.expand("body_mass")[:] *= 2
    expanded.restore(snapshot)
    assert_same_bits(expanded.snapshot()["model"]["body_mass"][1], plain.model.body_mass)


def test_restore_computes_derived_fields_to_the_bit() -> None:
    one, two = make_simulation(), make_simulation(threads=2)
    hands = one.site("hand"), two.site("hand")
    one.bind("ctrl")[:] = np.random.default_rng(0).uniform(-1, 1, (4, 7))
    one.step(17)
    state = one.state.copy()
    two.restore(one.snapshot())
    assert_same_bits(hands[0], hands[1])
    assert_same_bits(two.state, state)


def test_reset_row_equals_a_new_simulation() -> None:
    used, new = make_simulation(), make_simulation()
    used.bind("ctrl")[:] = 0.5
    used.bind("qfrc_applied")[:] = 1.0
    used.step(20)
    used.reset(np.arange(4))
    assert_same_bits(used.state, new.state)


FIELDS = ["qpos", "qvel", "ctrl", "qfrc_applied", "xfrc_applied"]
CASES = [(field, value) for field in FIELDS for value in (np.nan, np.inf, 1e30)]


# A huge but finite control is no fault: it is clamped to the servo's range.
@pytest.mark.parametrize(("field", "value"), [case for case in CASES if case != ("ctrl", 1e30)])
def test_divergence_is_caught_and_the_row_named(
    field: str, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # MuJoCo writes its warnings to a file in the working folder
    simulation = make_simulation(threads=2)
    simulation.step(3)
    simulation.bind(field)[2].flat[-1] = value
    with pytest.raises(NonFinite, match="environment 2") as caught:
        simulation.step(10)
    state = caught.value.arrays["state"]
    assert state.shape == simulation.state[0].shape
    assert not (np.abs(state) < 1e10).all(), "the reproduction holds the culprit"


def test_nan_in_a_policy_action_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = ReachConfig().build(4)
    env.reset(KEY)
    actions = np.zeros((4, 7), np.float32)
    actions[3, 5] = np.nan
    with pytest.raises(NonFinite, match="environment 3: ctrl"):
        env.step(actions)


def test_divergence_by_a_model_value_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    simulation = make_simulation()
    simulation.expand("body_mass")[1, 3] = np.nan
    with pytest.raises(NonFinite, match="environment 1") as caught:
        simulation.step(10)
    assert "model.body_mass" in caught.value.arrays


def test_a_bad_snapshot_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    simulation = make_simulation()
    with pytest.raises(UsageError, match="3 environments"):
        simulation.restore(make_simulation(3).snapshot())
    snapshot = simulation.snapshot()
    snapshot["state"][1, 2] = np.nan
    with pytest.raises(NonFinite, match="environment 1"):
        simulation.restore(snapshot)
    # The failure does not stick: a good snapshot makes the simulation usable again.
    simulation.restore(make_simulation().snapshot())
    simulation.step(1)


def test_streams_are_those_of_the_key() -> None:
    streams = Streams(5)
    for key in (KEY, KEY.child("other")):
        streams.use(key)
        for episode in (0, 7, 2**40):
            for row, stream in zip((1, 4), streams.begin((1, 4), (episode, 3)), strict=True):
                expected = key.episode(row, episode if row == 1 else 3)
                assert_same_bits(stream.random(9), expected.random(9))
                stream.integers(2**20, dtype=np.uint32)  # leaves half a word behind


def test_thread_count_changes_no_bit() -> None:
    ends = []
    for threads in (1, 2, 4):
        simulation = make_simulation(rows=16, threads=threads)
        simulation.bind("ctrl")[:] = np.random.default_rng(1).uniform(-1, 1, (16, 7))
        simulation.step(50)
        ends.append(digest(simulation.snapshot()))
    assert len(set(ends)) == 1
