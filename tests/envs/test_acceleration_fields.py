"""Fields of MuJoCo's acceleration stage, which a task may observe: forces, accelerations, touch."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
from mujoco.batch import DATA_FIELDS

from batch_env_contract import KEY, assert_same_bits, check_contract, play, random_actions
from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import Simulation
from etude.envs.mujoco.task import Action, Draws, Task

XML = """
<mujoco>
  <option timestep="0.005" integrator="{integrator}"><flag energy="enable"/></option>
  <worldbody>
    <light pos="0 0 3"/> <camera pos="0 -1 1"/>
    <geom type="plane" size="2 2 .1"/>
    <body pos="0 0 .3">
      <freejoint/> <geom size=".1"/> <site name="ball" size=".12"/>
      <body pos=".2 0 0">
        <joint name="arm" axis="0 1 0" damping=".1" stiffness="1"/>
        <geom type="capsule" size=".03" fromto="0 0 0 .3 0 0"/> <site name="end" pos=".3 0 0"/>
      </body>
    </body>
  </worldbody>
  <tendon><spatial><site site="ball"/><site site="end"/></spatial></tendon>
  <actuator>
    <general joint="arm" gear="3" dyntype="filter" dynprm=".1" gainprm="2" biasprm="0 -1 -.1"
      biastype="affine"/>
  </actuator>
  <sensor>
    <framepos objtype="site" objname="end"/> <touch site="ball"/> <accelerometer site="ball"/>
    <force site="end"/> <subtreelinvel body="world"/>
  </sensor>
</mujoco>
"""
BY_THE_INTEGRATOR = {"qDeriv", "qH", "qHDiagInv", "qLU"}
OTHER_FIELDS = {"plugin", "plugin_data", "solver_fwdinv", "qfrc_inverse"}
"""Pointers, and what only other functions than the forward dynamics fill."""


def compiled(integrator: str = "implicitfast") -> mujoco.MjModel:
    return mujoco.MjModel.from_xml_string(XML.format(integrator=integrator))


def by_hand(model: mujoco.MjModel, simulation: Simulation, row: int) -> mujoco.MjData:
    """MuJoCo's own forward dynamics of a row's state."""
    data = mujoco.MjData(model)
    state = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(model, data, simulation.state[row], state)
    mujoco.mj_forward(model, data)
    return data


@pytest.mark.parametrize("integrator", ["Euler", "implicit", "implicitfast", "RK4"])
def test_after_a_reset_every_field_is_what_plain_mujoco_computes(integrator: str) -> None:
    """One field is bound at a time, as another could bring in the stage that it needs."""
    model = compiled(integrator)
    compared = set()
    for name in sorted(DATA_FIELDS - BY_THE_INTEGRATOR - OTHER_FIELDS):
        simulation = Simulation(model, 3)
        bound = simulation.bind(name)
        simulation.bind("qpos")[:, 2] = (0.095, 0.15, 0.09)
        simulation.bind("qvel")[:] = np.linspace(-2, 2, 3 * model.nv).reshape(3, -1)
        simulation.bind("ctrl")[:, 0] = (0.5, -0.3, 0.9)
        simulation.step(7)
        simulation.reset(np.array([1]))
        simulation.bind("qpos")[1, 2] = 0.095
        simulation.bind("qvel")[1] = 0.3
        simulation.bind("ctrl")[1] = 0.4
        simulation.forward(np.array([1]))
        expected = np.asarray(getattr(by_hand(model, simulation, 1), name), bound.dtype)
        if expected.size and name not in ("time", "eq_active"):
            assert_same_bits(bound[1].reshape(expected.shape), expected)
            compared.add(name)
    assert {"actuator_force", "sensordata", "qacc", "cfrc_ext", "qfrc_constraint"} <= compared
    assert len(compared) > 60


@pytest.mark.parametrize("name", sorted(BY_THE_INTEGRATOR))
def test_what_only_the_integrator_computes_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no value after a reset"):
        Simulation(compiled(), 2).bind(name)


class Ball(Action):
    """Acts by the force that it felt last, and feels actuator force and touch."""

    size = 1

    def bind(self) -> None:
        bind = self.env.simulation.bind
        self.position, self._control = bind("qpos"), bind("ctrl")
        self.force, self.sensors = bind("actuator_force"), bind("sensordata")

    def apply(self, actions: Array) -> None:
        self._control[:] = actions - 0.2 * self.force

    def reset(self, env_ids: Array, draws: Draws) -> None:
        heights = np.array([generator.uniform(0.09, 0.11) for generator in draws.generators])
        self.position[env_ids, 2] = heights
        self._control[env_ids, 0] = 50.0 * (heights - 0.1)


def make_ball(num_envs: int, threads: int = 1) -> MujocoEnv:
    ball = Ball()
    task = Task(
        model=compiled(),
        action=ball,
        view=ball,
        observations={"state": {"force": lambda b: b.force, "sensors": lambda b: b.sensors}},
        rewards={"height": (lambda b: b.position[:, 2], 1.0)},
        terminations={"high": lambda b: b.sensors[:, 3] > 30.0},
        success=lambda b: b.position[:, 2] > 1.0,
        substeps=3,
        max_episode_steps=17,
    )
    return MujocoEnv(task, num_envs, threads)


def test_first_observations_are_those_of_plain_mujoco() -> None:
    env = make_ball(8)
    model = env.simulation.model
    obs, begun = env.reset(KEY)["state"], np.arange(8)
    touched = 0
    for actions in random_actions(env, 60):
        for row in begun:
            data = by_hand(model, env.simulation, row)
            expected = np.concatenate([data.actuator_force, data.sensordata])
            assert_same_bits(obs[row], expected.astype(np.float32))
            touched += data.sensordata[3] > 0
        result = env.step(actions)
        obs, begun = result.obs["state"], result.final_envs
    assert touched > 8


def test_contract_of_a_task_that_feels_forces() -> None:
    check_contract(make_ball)


def test_a_snapshot_holds_the_forces_of_the_last_substep() -> None:
    """What was felt last decides the next action, and the state after it does not tell it."""
    env, other = make_ball(8), make_ball(8, threads=2)
    env.reset(KEY)
    actions = random_actions(env, 30)
    play(env, actions[:10])
    snapshot, felt = env.snapshot(), env.view.force.copy()
    expected = play(env, actions[10:])
    other.restore(snapshot, KEY)
    assert_same_bits(other.view.force, felt)
    assert play(other, actions[10:]) == expected
    snapshot["simulation"]["accelerations"] = {}
    other.restore(snapshot, KEY)
    assert play(other, actions[10:]) != expected
