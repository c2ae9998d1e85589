"""The task API: parts, terms, the observation pipeline, randomisation, all exact in snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest

from etude import mj
from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.keys import Key
from etude.core.trees import digest
from etude.envs.check import check_env
from etude.envs.mujoco.randomize import Push, Randomization
from etude.mj import observations as obs
from etude.mj import resets, rewards, terminations

HOPPER = """
<mujoco>
  <option timestep="0.005"/>
  <worldbody>
    <geom name="floor" type="plane" size="0 0 1"/>
    <body name="trunk" pos="0 0 0.5">
      <freejoint/>
      <geom name="trunk" type="box" size=".1 .1 .05" mass="2"/>
      <body name="leg" pos="0 0 -.1">
        <joint name="hip" type="hinge" axis="0 1 0" range="-60 60" damping="1" armature=".01"/>
        <geom name="leg" type="capsule" fromto="0 0 0 0 0 -.2" size=".02" mass=".3" contype="0"
          conaffinity="0"/>
        <geom name="a_foot" type="sphere" size=".03" pos=".08 0 -.2" mass=".1"/>
        <geom name="b_foot" type="sphere" size=".03" pos="-.08 0 -.2" mass=".1"/>
      </body>
    </body>
  </worldbody>
  <keyframe><key name="up" qpos="0 0 .4 1 0 0 0 .2"/></keyframe>
</mujoco>
"""


def hopper(**changes: Any) -> mj.Task:
    """A trunk on a leg with servos, and everything that a task can have."""
    robot = mj.Robot("trunk", home="up")
    feet = mj.Feet("._foot")
    twist = mj.VelocityCommand(robot, every=(0.1, 0.3))
    random = changes.pop("random", Randomization())
    parts = [robot, resets.BasePose(robot), resets.JointNoise(robot, 0.1, 0.5), feet, twist]
    task = mj.Task(
        model=HOPPER,
        parts=[*parts, *random.parts(robot)],
        action=mj.JointTargets(
            robot, 0.5, stiffness=20.0, damping=0.5, torque=3.0, delay=random.latency
        ),
        observations={
            "state": {
                "gravity": obs.gravity(robot),
                "joints": obs.joint_positions(robot),
                "velocity": obs.velocity(robot),
                "action": obs.last_action(),
                "command": obs.command(twist),
                "contact": obs.contact(feet),
                "air": obs.air_time(feet),
            }
        },
        rewards={
            "track": (rewards.track_velocity(twist), 1.0),
            "air": (rewards.air_time(feet), 1.0),
            "slip": (rewards.foot_slip(feet), -0.01),
            "rate": (rewards.action_rate, -0.1),
        },
        terminations={"tilted": terminations.tilted(robot, 70.0)},
        statistics={"error": lambda _: twist.mean_error(0, settled=True)},
        substeps=4,
        max_episode_steps=40,
    )
    return replace(task, **changes)


EVERYTHING = Randomization(
    mass=0.3,
    added_mass=(-0.2, 0.4),
    friction=0.3,
    gains=0.2,
    armature=0.3,
    damping=0.3,
    gravity=0.1,
    joint_offset=0.05,
    latency=(0, 2),
    push=0.5,
    push_every=(0.1, 0.3),
)


def disturbed() -> mj.Task:
    """The hopper, randomised, with a pipeline on what is observed."""
    task = hopper(random=EVERYTHING)
    (robot,) = (part for part in task.parts if isinstance(part, mj.Robot))
    late = {
        "gyro": obs.angular_velocity(robot, noise=0.1, clip=(-2.0, 2.0), scale=0.5),
        "joints": obs.joint_positions(robot, delay=(1, 3), history=2, noise=0.01),
    }
    states = {**task.observations, "late": mj.Group(late, delay=(0, 2), history=2)}
    return replace(task, observations=states)


def actions(env: mj.MujocoEnv, steps: int, seed: int = 0) -> Array:
    size = (steps, env.num_envs, len(env.spec.action.low))
    return np.random.default_rng(seed).uniform(-1, 1, size).astype(np.float32)


def played(env: mj.MujocoEnv, given: Array) -> list[dict[str, Any]]:
    """Everything that steps give."""
    found = []
    for action in given:
        result = env.step(action)
        found.append(
            {
                "obs": result.obs,
                "reward": result.reward,
                "terminated": result.terminated,
                "final": result.final_obs,
                "episodes": {k.replace("/", "."): v for k, v in result.episodes.items()},
            }
        )
    return found


def same(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
    return [digest(x) for x in one] == [digest(x) for x in two]


@pytest.mark.parametrize("make", [hopper, disturbed])
def test_a_task_keeps_the_contract(make: Any) -> None:
    findings = check_env(lambda n, threads=1: mj.MujocoEnv(make(), n, threads), 60)
    assert [f for f in findings if f.verdict != "passed"] == []


def test_terms_of_a_wrong_shape_are_named() -> None:
    task = hopper()
    wide = replace(task, rewards={"odd": (lambda env: np.ones((env.num_envs, 3)), 1.0)})
    with pytest.raises(UsageError, match=r"reward 'odd' returns an array of shape \[4, 3\]"):
        mj.MujocoEnv(wide, 4)
    short = replace(task, observations={"state": {"odd": lambda _: np.ones(5)}})
    with pytest.raises(UsageError, match=r"'state/odd' returns an array of shape \[5\] for 4"):
        mj.MujocoEnv(short, 4)
    one = replace(task, observations={"state": {"one": lambda env: env.elapsed * 1.0}})
    assert mj.MujocoEnv(one, 4).spec.observations["state"].shape == (1,)


def test_the_same_bits_on_any_number_of_threads() -> None:
    runs = []
    for threads in (1, 2, 4):
        env = mj.MujocoEnv(disturbed(), 12, threads)
        env.reset(Key(1))
        runs.append(played(env, actions(env, 50)))
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.parametrize("cut", [1, 17, 43])
def test_a_snapshot_in_the_middle_continues_bit_for_bit(cut: int) -> None:
    env = mj.MujocoEnv(disturbed(), 6)
    env.reset(Key(2))
    given = actions(env, 60)
    played(env, given[:cut])
    snapshot = env.snapshot()
    rest = played(env, given[cut:])
    other = mj.MujocoEnv(disturbed(), 6)
    other.reset(Key(99))
    other.restore(snapshot, Key(2))
    assert same(rest, played(other, given[cut:]))


def observed(terms: dict[str, Any] | mj.Group, plain: dict[str, Any]) -> tuple[Array, Array]:
    """[steps, num_envs, n] of an observation and of its terms as they are, in one episode."""
    robot = mj.Robot("trunk", home="up")

    def made(which: Any) -> Any:
        return which(robot) if callable(which) else which

    task = mj.Task(
        model=HOPPER,
        parts=[robot, resets.JointNoise(robot, 0.3)],
        action=mj.JointTargets(robot, 0.5, stiffness=20.0, damping=0.5),
        observations={"state": made(terms), "plain": made(plain)},
        rewards={},
        max_episode_steps=1000,
        substeps=2,
    )
    env = mj.MujocoEnv(task, 8)
    seen = [env.reset(Key(4))]
    seen += [env.step(action).obs for action in actions(env, 30)]
    return np.stack([o["state"] for o in seen]), np.stack([o["plain"] for o in seen])


def joints(**pipeline: Any) -> Any:
    return lambda robot: {"joints": obs.joint_positions(robot, **pipeline)}


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_a_delay_of_k_equals_a_shifted_array(delay: int) -> None:
    late, plain = observed(joints(delay=(delay, delay)), joints())
    np.testing.assert_array_equal(late[delay:], plain[:-delay])
    np.testing.assert_array_equal(late[:delay], np.broadcast_to(plain[0], late[:delay].shape))


def test_a_group_is_late_as_a_whole() -> None:
    late, plain = observed(
        lambda robot: mj.Group(
            {"a": obs.joint_positions(robot), "b": obs.gravity(robot)}, delay=(3, 3)
        ),
        lambda robot: {"a": obs.joint_positions(robot), "b": obs.gravity(robot)},
    )
    np.testing.assert_array_equal(late[3:], plain[:-3])


def test_delays_are_drawn_between_their_bounds() -> None:
    late, plain = observed(joints(delay=(1, 4)), joints())
    found = set()
    for env_id in range(8):
        fits = [
            k for k in (1, 2, 3, 4) if (late[k:, env_id] == plain[: len(plain) - k, env_id]).all()
        ]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) > 1


def test_history_is_the_last_measurements_newest_first() -> None:
    seen, plain = observed(joints(history=3), joints())
    expected = [plain[[max(t - k, 0) for t in range(len(plain))]] for k in range(3)]
    np.testing.assert_array_equal(seen, np.concatenate(expected, axis=2))


def test_noise_clip_and_scale_in_this_order() -> None:
    seen, plain = observed(joints(noise=0.2, clip=(-0.1, 0.25), scale=10.0), joints())
    assert seen.min() >= -1.0
    assert seen.max() == 2.5
    noisy, plain = observed(joints(noise=0.2), joints())
    away = noisy - plain
    assert np.abs(away).max() <= 0.2 + 1e-6
    assert abs(float(away.mean())) < 0.03
    assert float(away.std()) == pytest.approx(0.2 / np.sqrt(3), rel=0.15)
    assert len(np.unique(away)) == away.size


def test_noise_shown_again_is_the_same_noise() -> None:
    seen, _ = observed(joints(noise=0.2, history=2), joints())
    np.testing.assert_array_equal(seen[1:, :, 1], seen[:-1, :, 0])


def test_draws_are_uniform_and_independent() -> None:
    env = mj.MujocoEnv(hopper(), 500)
    env.reset(Key(7))
    first = env.draws.uniform("a", 4)
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02
    assert abs(float(first.var()) - 1 / 12) < 0.005
    others = [env.draws.uniform("b", 4)]
    env.elapsed += 1
    others.append(env.draws.uniform("a", 4))
    env.elapsed -= 1
    env.episode += 1
    others.append(env.draws.uniform("a", 4))
    env.episode -= 1
    for other in (*others, np.roll(first, 1, axis=0), np.roll(first, 1, axis=1)):
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.08
    some = np.array([3, 400])
    np.testing.assert_array_equal(mj.Draws(env, some).uniform("a", 4), first[some])
    normal = env.draws.normal("n", 4)
    assert abs(normal.mean()) < 0.08
    assert float(normal.std()) == pytest.approx(1.0, rel=0.05)
    counts = np.bincount(env.draws.integers("i", 2, 4))
    assert counts[:2].sum() == 0
    assert (counts[2:] > 120).all()


def test_what_is_randomised_stays_in_its_range_and_constants_follow() -> None:
    env = mj.MujocoEnv(hopper(random=EVERYTHING), 200)
    env.reset(Key(5))
    model, expand = env.simulation.model, env.simulation.expand
    trunk, leg = model.body("trunk").id, model.body("leg").id
    masses = expand("body_mass")
    share = masses[:, leg] / model.body_mass[leg]
    assert share.min() >= 0.7
    assert share.max() <= 1.3
    assert share.std() > 0.1
    added = masses[:, trunk] - model.body_mass[trunk] * share.mean()
    assert added.min() < -0.3
    assert added.max() > 0.5
    np.testing.assert_allclose(
        expand("body_inertia")[:, leg], model.body_inertia[leg] * share[:, None], rtol=1e-12
    )
    np.testing.assert_allclose(
        expand("body_subtreemass")[:, trunk], masses[:, trunk] + masses[:, leg], rtol=1e-12
    )
    friction = expand("geom_friction") / model.geom_friction
    assert (friction[:, :, 1:] == 1).all()
    assert np.ptp(friction[:, :, 0], axis=1).max() < 1e-12
    gains = expand("actuator_gainprm")[:, 0, 0] / model.actuator_gainprm[0, 0]
    np.testing.assert_allclose(
        gains, expand("actuator_biasprm")[:, 0, 2] / model.actuator_biasprm[0, 2]
    )
    assert 0.8 <= gains.min() < gains.max() <= 1.2
    pull = expand("opt.gravity")[:, 2]
    assert -10.8 <= pull.min() < pull.max() <= -8.8
    before = masses.copy()
    env.restart()
    assert (masses[:, leg] != before[:, leg]).all()


def test_encoders_that_are_off_move_what_is_measured_and_what_is_done() -> None:
    task = hopper(random=Randomization(joint_offset=0.2))
    env = mj.MujocoEnv(task, 4)
    env.reset(Key(0))
    robot = task.parts[0]
    assert isinstance(robot, mj.Robot)
    true = env.simulation.bind("qpos")[:, robot.qpos_ids] - robot.default_joints
    np.testing.assert_allclose(robot.joint_positions, true + robot.joint_offset)
    env.step(np.zeros((4, 1), np.float32))
    aimed = env.simulation.bind("ctrl") - robot.default_joints
    np.testing.assert_allclose(aimed, -robot.joint_offset)


def test_a_push_changes_the_planar_velocity_once() -> None:
    robot = mj.Robot("trunk", home="up")
    task = mj.Task(
        model=HOPPER.replace('timestep="0.005"', 'timestep="0.005" gravity="0 0 0"'),
        parts=[robot, Push(robot, 0.7, (0.2, 0.4))],
        action=mj.JointTargets(robot, 0.5, stiffness=20.0),
        observations={"state": {"v": lambda env: robot.world_velocity}},
        rewards={},
        max_episode_steps=200,
        substeps=4,
    )
    env = mj.MujocoEnv(task, 20)
    env.reset(Key(0))
    speeds = np.stack(
        [np.linalg.norm(env.step(a).obs["state"][:, :2], axis=1) for a in actions(env, 25) * 0]
    )
    first = (speeds > 0.3).argmax(axis=0)
    assert (first >= 9).all()
    assert (first <= 20).all()
    at = speeds[first, np.arange(20)]
    np.testing.assert_allclose(at, 0.7, rtol=0.05)  # the leg below it swings a little


def test_an_action_takes_effect_late() -> None:
    env = mj.MujocoEnv(hopper(random=Randomization(latency=(2, 2))), 3)
    env.reset(Key(0))
    control = env.simulation.bind("ctrl")
    given = actions(env, 6)
    done = []
    for action in given:
        env.step(action)
        done.append(control.copy())
    robot = env.task.parts[0]
    assert isinstance(robot, mj.Robot)
    low, high = robot.joint_range.T
    for t in range(2, 6):
        expected = np.clip(robot.default_joints + 0.5 * given[t - 2], low, high)
        np.testing.assert_allclose(done[t], expected, rtol=1e-6)
    np.testing.assert_array_equal(env.action, given[-1])


def test_contact_and_air_time_by_hand() -> None:
    task = hopper(terminations={})
    feet = task.parts[3]
    assert isinstance(feet, mj.Feet)
    env = mj.MujocoEnv(task, 5)
    env.reset(Key(3))
    flight = np.zeros((5, 2))
    for action in actions(env, 39):
        env.step(action)
        down = contacts(env)
        flight += env.dt
        np.testing.assert_array_equal(feet.contact, down)
        np.testing.assert_allclose(feet.air_time, flight)
        np.testing.assert_array_equal(feet.landed, down & (flight > 1.5 * env.dt))
        flight[down] = 0.0


def contacts(env: mj.MujocoEnv) -> Array:
    """[num_envs, 2]: whether each foot touched something in the last substep, by MuJoCo itself."""
    model = env.simulation.model
    found = np.zeros((env.num_envs, 2), np.bool_)
    sensors = [int(model.sensor(f"contact/{name}_foot").adr[0]) for name in "ab"]
    values = env.simulation.bind("sensordata")
    found[:] = values[:, sensors] > 0
    # The sensor against the contacts of a simulation from the same state, where it is decided.
    data = mujoco.MjData(model)
    for env_id in range(env.num_envs):
        spec = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_setState(model, data, env.simulation.state[env_id], spec)
        mujoco.mj_forward(model, data)
        touching = {int(g) for c in data.contact for g in c.geom}
        for foot, name in enumerate("ab"):
            geom = model.geom(f"{name}_foot")
            lowest = data.geom_xpos[geom.id, 2] - 0.03
            if abs(lowest) > 0.02:
                assert found[env_id, foot] == (geom.id in touching)
    return found


def commanded(**how: Any) -> tuple[mj.MujocoEnv, mj.VelocityCommand]:
    """30 hoppers that observe their commands, which change every 0.2 to 0.4 s."""
    robot = mj.Robot("trunk", home="up")
    ranges = {"x": (0.5, 1.0), "y": (-0.2, 0.2), "yaw": (0.0, 2.0), "every": (0.2, 0.4)}
    twist = mj.VelocityCommand(robot, **ranges, zero=0.3, **how)
    task = mj.Task(
        model=HOPPER,
        parts=[robot, twist],
        action=mj.JointTargets(robot, 0.5, stiffness=20.0),
        observations={"state": {"command": obs.command(twist)}},
        rewards={"track": (rewards.track_velocity(twist), 1.0)},
        statistics={"error": lambda _: twist.mean_error(0, settled=False)},
        max_episode_steps=100,
        substeps=4,
    )
    return mj.MujocoEnv(task, 30), twist


def test_commands_move_no_faster_than_their_acceleration() -> None:
    env, twist = commanded(acceleration=8.0)
    (sudden, asked), most = commanded(), 8.0 * env.dt
    command = env.reset(Key(0))["state"]
    sudden.reset(Key(0))
    assert not command.any()
    there, errors = 0, np.zeros(30)
    for action in actions(env, 60):
        expected = command + np.clip(twist.target - command, -most, most)
        command = env.step(action).obs["state"]
        errors += np.linalg.norm(twist._robot.heading_velocity[:, :2] - asked.target[:, :2], axis=1)
        sudden.step(action)
        # The same are drawn, and what was drawn in this step is moved to at once.
        np.testing.assert_array_equal(twist.target, asked.target)
        moved = np.where(twist._age[:, None] > 0, expected, command)
        np.testing.assert_allclose(command, moved, atol=1e-6)
        there += int((np.abs(twist.target - command) < 1e-6).all(axis=1).sum())
    assert 600 < there < 30 * 60
    np.testing.assert_allclose(twist.mean_error(0, settled=False), errors / 60, rtol=1e-6)


def test_commands_change_at_their_times_and_stay_in_their_ranges() -> None:
    env, _ = commanded()
    seen = [env.reset(Key(0))["state"]]
    for action in actions(env, 90):
        seen.append(env.step(action).obs["state"])
    commands = np.stack(seen)
    x, y, yaw = np.moveaxis(commands, 2, 0)
    assert (((x >= 0.5) & (x <= 1.0)) | (x == 0)).all()
    assert (np.abs(y) <= 0.2).all()
    assert ((yaw >= 0) & (yaw <= 2)).all()
    assert 0.2 < (x == 0).mean() < 0.4
    changed = (np.diff(commands, axis=0) != 0).any(axis=2)
    for env_id in range(30):
        times = np.flatnonzero(changed[:, env_id])
        assert (np.diff(times) >= 10).all()  # two commands in a row may be all zero
        assert len(times) >= 4


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mj.MujocoEnv(hopper(model="nowhere.xml"), 1), "no model file nowhere.xml"),
        (lambda: mj.MujocoEnv(hopper(model="<mujoco><oops/></mujoco>"), 1), "cannot read"),
        (lambda: mj.Robot().joint_positions, "has no environment: add it"),
        (lambda: mj.MujocoEnv(hopper(parts=[mj.Robot(joints="knee")]), 1), "joint.*'knee'.*hip"),
        (lambda: mj.MujocoEnv(hopper(parts=[mj.Robot(home="down")]), 1), "keyframe.*down.*up"),
        (lambda: mj.MujocoEnv(hopper(parts=[mj.Feet("paw")]), 1), "geom.*'paw'.*a_foot"),
        (lambda: mj.Observation(lambda _: np.zeros(1), delay=(2, 1)), "delay"),
        (lambda: mj.Controls(delay=(-1, 1)), "delay"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(make: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


def test_two_states_of_one_name_are_refused() -> None:
    robot = mj.Robot("trunk")
    twice = [robot, mj.VelocityCommand(robot), mj.VelocityCommand(robot)]
    with pytest.raises(UsageError, match="Two parts"):
        mj.MujocoEnv(hopper(parts=twice, action=mj.JointTargets(robot, stiffness=1.0)), 1)


class Hidden(mj.Part):
    """A part with state that it does not declare."""

    def bind(self) -> None:
        self.count = np.zeros(self.env.num_envs)

    def update(self) -> None:
        self.count += 1


def test_check_finds_state_that_is_not_declared() -> None:
    def made(num_envs: int, threads: int = 1) -> mj.MujocoEnv:
        task, hidden = hopper(), Hidden()
        shown = {**task.observations, "more": {"count": lambda _: hidden.count}}
        changed = replace(task, parts=[*task.parts, hidden], observations=shown)
        return mj.MujocoEnv(changed, num_envs)

    broken = [f for f in check_env(made, 60) if f.verdict == "failed"]
    items = {"a key decides everything", "a snapshot continues bit for bit"}
    assert {f.item for f in broken} == items
    assert all("env.state(...)" in f.fix for f in broken)


def test_a_success_that_is_a_number_is_refused() -> None:
    env = mj.MujocoEnv(hopper(success=lambda env: env.elapsed / 50.0, max_episode_steps=2), 2)
    env.reset(Key(0))
    first, second = actions(env, 2)
    env.step(first)
    with pytest.raises(
        UsageError, match="`success` of the task returns float64: it must return bool"
    ):
        env.step(second)


def test_an_episode_tells_which_termination_ended_it() -> None:
    def late(env: mj.MujocoEnv) -> Array:
        return (env.elapsed >= 3) & (np.arange(env.num_envs) == 1)

    def early(env: mj.MujocoEnv) -> Array:
        return (env.elapsed >= 2) & (np.arange(env.num_envs) == 2)

    def odd(env: mj.MujocoEnv) -> Array:
        return np.arange(env.num_envs) % 2 == 1

    ends = {"late": late, "early": early}
    for success, expected in (
        ("survived", {"early": [2], "late": [1], "success": [0, 3]}),
        (odd, {"early": [2], "success": [1, 3], "no success in time": [0]}),
    ):
        env = mj.MujocoEnv(hopper(terminations=ends, success=success, max_episode_steps=4), 4)
        env.reset(Key(3))
        found: dict[str, list[int]] = {}
        for action in actions(env, 4):
            result = env.step(action)
            told = result.episodes.get("outcome", np.zeros(0))
            for env_id, outcome in zip(result.final_envs, told, strict=True):
                if env.episode[env_id] == 1:
                    found.setdefault(env.spec.outcomes[int(outcome)], []).append(int(env_id))
        assert found == expected


def test_a_task_without_success_reports_none() -> None:
    env = mj.MujocoEnv(hopper(success=None, max_episode_steps=2), 3)
    env.reset(Key(3))
    results = [env.step(action) for action in actions(env, 2)]
    assert not {"is_success", "outcome"} & {*env.spec.statistics, *results[-1].episodes}
    assert set(env.spec.statistics) == set(results[-1].episodes)
