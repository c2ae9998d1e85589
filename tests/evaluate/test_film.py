"""What films show, of whichever environment, and that filming changes no number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import pytest

from etude.cli import watching
from etude.core.contracts import Pictured
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.envs.adapters.gym import GymConfig, make_gym
from etude.envs.mujoco import rendering
from etude.envs.mujoco.decor import decorated, floating_root, frame
from etude.envs.mujoco.simulation import Camera
from etude.evaluate import film
from etude.evaluate.footage import (
    Drawn,
    MujocoRecorder,
    Pictures,
    footage,
    recorder,
    strip_steps,
)
from etude.evaluate.playing import Player, RandomActor
from etude.planning import recipes
from etude.planning.recipe import Recipe
from glide import Glide
from toys import tiny_reach

HIDDEN = """
<mujoco>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body name="crate" pos="2 0 .1"><freejoint/><geom type="box" size=".1 .1 .1" mass="1"/></body>
    <body name="dog" pos="0 0 .4">
      <freejoint/>
      <geom type="box" size=".25 .12 .07" mass="8" group="3"/>
      <body pos=".2 .1 0">
        <joint axis="0 1 0"/><geom type="capsule" fromto="0 0 0 0 0 -.3" size=".03" group="3"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def drawable() -> None:
    try:
        rendering.backend()
    except EtudeError as error:
        pytest.skip(str(error))


def of_model(text: str) -> Any:
    """What is looked at of an environment of a model."""
    task = SimpleNamespace(model=text, camera=Camera())
    simulation = SimpleNamespace(model=mujoco.MjModel.from_xml_string(text))
    return SimpleNamespace(task=task, simulation=simulation, parts=())


@pytest.mark.parametrize("name", ["pick-place", "walk-go1", "halfcheetah"])
def test_a_filmed_environment_gives_the_same_numbers(name: str) -> None:
    """Also one whose derived fields lag a physics step behind."""
    config = recipes.find(name).task
    if name == "halfcheetah":
        config = config.model_copy(update={"engine": "batch"})
    plain, filmed = config.build(3), config.build(3)
    recording = MujocoRecorder(filmed, filmed, [(1, 0)])
    actor = RandomActor(plain.spec, Key(5), 3)
    seen = [plain.reset(Key(1)), recording.reset(Key(1))]
    for _ in range(12):
        actions = plain.spec.action.to_env(actor.act(seen[0]))
        one, two = plain.step(actions), recording.step(actions)
        for name in one.obs:
            assert np.array_equal(one.obs[name], two.obs[name])
        assert np.array_equal(one.reward, two.reward)
        assert np.array_equal(plain.simulation.state, filmed.simulation.state)
    kept = recording.recordings[1, 0]
    substeps = filmed.task.substeps
    assert len(kept.path) == substeps * (len(kept.states) - 1) + 1
    assert np.array_equal(kept.path[::substeps], kept.states)


def test_films_run_in_real_time() -> None:
    """30 pictures a second, or as near to it as physics steps allow."""
    shown = Drawn(Pictures(50.0, moments=5))
    assert shown.moment_rate / shown.stride == 25.0
    for name, rate in {"reach": 100 / 3, "walk-go1": 31.25, "imitate-walk": 30.0}.items():
        env: Any = recipes.find(name).task.build(1)
        recording = MujocoRecorder(env, env, [(0, 0)])
        recording.reset(Key(0))
        shown = footage(env, recording.recordings[0, 0])  # type: ignore[assignment]
        assert shown.moment_rate / shown.stride == pytest.approx(rate)


def test_a_floor_does_not_end_before_the_robot() -> None:
    wall = '<geom type="plane" size="3 1 .1" pos="9 0 1" zaxis="-1 0 0"/>'
    env = of_model(HIDDEN.replace("</worldbody>", wall + "</worldbody>"))
    seen, planes = decorated(env), env.simulation.model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
    assert seen.geom_size[planes, :2].tolist() == [[0, 0], [3, 1]], "0 is drawn without an end"
    assert env.simulation.model.geom_size[planes, 0].tolist() == [5, 3], "the simulation's stays"


def test_a_hidden_robot_is_shown_and_followed() -> None:
    env = of_model(HIDDEN)
    plain, seen = env.simulation.model, decorated(env)
    assert (seen.geom_group < 3).all()
    root = floating_root(plain)
    assert plain.body(root).name == "dog", "the heaviest, not the crate"
    place = frame(Camera(), plain)
    assert place.body == root
    assert np.allclose(place.look_at, [0.0, 0.0, 0.27], atol=0.1)
    assert 0.6 < place.distance < 1.6
    assert frame(replace(Camera(), look_at=(1.0, 0.0, 0.0), distance=2.0), plain).body is None
    arm: Any = recipes.find("pick-place").task.build(1)
    assert floating_root(arm.simulation.model) is None, "a cube is not followed"


PENDULUM = """<mujoco><worldbody>
<body pos="0 0 1"><joint type="hinge" axis="0 1 0"/>
<geom type="capsule" fromto="0 0 0 0 0 -.5" size=".03"/></body>
</worldbody></mujoco>"""


def test_what_swings_about_a_fixed_place_is_seen_wherever_it_is() -> None:
    place = frame(Camera(), mujoco.MjModel.from_xml_string(PENDULUM))
    assert np.allclose(place.look_at, [0.0, 0.0, 1.0], atol=0.1), "the joint"
    assert 0.53 < place.distance * np.sin(np.deg2rad(45 / 2)) < 0.9, "half of the picture, m"


@pytest.mark.usefixtures("drawable")
def test_a_hidden_robot_is_seen() -> None:
    from etude.envs.mujoco.rendering import Studio

    env = of_model(HIDDEN)
    model, kind = decorated(env), int(mujoco.mjtState.mjSTATE_INTEGRATION)
    data, state = mujoco.MjData(model), np.empty(mujoco.mj_stateSize(model, kind))
    pictures = []
    with Studio(model, Camera(), 160, 90) as camera:
        for x in (0.0, 50.5):
            data.joint(1).qpos[0] = x
            mujoco.mj_getState(model, data, state, kind)
            pictures.append(camera.picture(state).astype(int))
    for picture in pictures:
        red, _, blue = np.moveaxis(picture, -1, 0)
        assert (blue > red + 25).sum() > 100, "the robot, blue at its root"
        assert picture[-10:].std() < 40, "the floor"
    first, gone = (picture[30:60, 60:100] for picture in pictures)
    assert np.abs(first - gone).mean() < 20, "it is followed"


def test_gymnasium_draws_itself() -> None:
    pytest.importorskip("pygame")
    env = GymConfig(id="CartPole-v1").for_film().build(2)
    recording: Any = recorder(env, [(1, 0), (1, 1)])
    recording.reset(Key(0))
    endings = 0
    while endings < 2:
        endings += int(1 in recording.step(np.array([0, 1])).final_envs)
    first, second = (recording.recordings[1, episode] for episode in (0, 1))
    assert len(first.jpegs) > 5
    # It ends where the episode did, tilted, not where the next one begins.
    (end,) = (each.pixels for each in Drawn(first).draw([len(first.jpegs) - 1], (300, 200)))
    (start,) = (each.pixels for each in Drawn(second).draw([0], (300, 200)))
    assert np.abs(end.astype(int) - start).mean() > 0.5
    assert end.shape == (200, 300, 3)
    recording.close()
    assert GymConfig(id="Ant-v5").for_film((640, 360)).kwargs["height"] == 360
    assert GymConfig(id="Ant-v5", engine="batch").for_film().kwargs == {}
    assert GymConfig(id="Ant-v5").for_film().kwargs["width"] == 1280


@pytest.mark.usefixtures("drawable")
def test_a_film_of_gymnasium_follows_a_robot_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", rendering.backend())
    env: Any = make_gym(GymConfig(id="Swimmer-v5").for_film((160, 90)))
    env.reset(seed=0)
    qpos, qvel = env.unwrapped.data.qpos.copy(), env.unwrapped.data.qvel.copy()
    qpos[:2] += 50.0
    env.unwrapped.set_state(qpos, qvel)
    red, _, blue = np.moveaxis(env.render().astype(int), -1, 0)
    env.close()
    assert (red > blue + 60).sum() > 100, "its body is orange"


def test_of_a_long_episode_only_what_is_shown_is_drawn() -> None:
    recording = Pictures(rate=25.0, steps=1000)
    drawn = [moment for moment in range(1001) if recording.wants(moment)]
    shown = Drawn(Pictures(25.0, moments=1001, jpegs=dict.fromkeys(drawn, b"")))
    assert drawn == sorted({*strip_steps(shown.steps), *range(shown.begin, shown.moments)})
    assert len(drawn) < 400
    assert all(Pictures(rate=25.0, steps=300).wants(moment) for moment in range(301))
    assert all(Pictures(rate=25.0).wants(moment) for moment in range(1001))


def test_agents_of_pettingzoo_draw_themselves() -> None:
    pytest.importorskip("mpe2")
    config = recipes.find("spread").task.for_film()
    env = config.build(config.num_agents)
    film.check_env(env, config.kind)
    ((episode, pictures),) = Player(env, RandomActor(env.spec, Key(0), 3), Key(0)).record(0.5)
    assert (episode.length, len(pictures.jpegs)) == (5, 6)
    assert "ended" not in episode.sentence()
    assert "Terms" not in episode.sentence()


def test_what_draws_nothing_is_refused_before_it_is_recommended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(film, "check_tools", lambda: None)

    def refusal(env: dict[str, Any]) -> str:
        recipe = Recipe.model_validate(tiny_reach(2).model_dump(mode="json") | {"env": env})
        with pytest.raises(UsageError) as told:
            watching.play(recipe, tmp_path, watching.PlayCommand(run=str(tmp_path)))
        return str(told.value)

    assert "`etude eval" in refusal({"kind": "gym", "id": "CartPole-v1"})
    told = refusal({"kind": "task", "task": "toy_envs:MotionEnv"})
    assert "give the task a method picture(env_id)" in told
    assert "etude eval" not in told
    monkeypatch.setattr("gymnasium.envs.classic_control.CartPoleEnv.render", lambda self: None)
    told = refusal({"kind": "gym", "id": "CartPole-v1"})
    assert "'CartPole-v1' cannot be rendered" in told
    assert "etude eval" not in told


def test_a_task_of_ones_own_draws_itself() -> None:
    class Shown(Glide):
        def picture(self, row: int) -> Any:
            return np.full((20, 30, 3), 10 * int(self.elapsed[row]), np.uint8)

    env = Shown(2)
    assert isinstance(env, Pictured)
    recording: Any = recorder(env, [(0, 0)])
    obs = recording.reset(Key(0))
    actor = RandomActor(env.spec, Key(0), 2)
    while not len((result := recording.step(env.spec.action.to_env(actor.act(obs)))).final_envs):
        obs = result.obs
    shown = Drawn(recording.recordings[0, 0])
    values = [
        int(picture.pixels[10, 15, 0]) for picture in shown.draw(range(shown.moments), (30, 20))
    ]
    assert values == pytest.approx([10 * step for step in range(shown.moments)], abs=2)
