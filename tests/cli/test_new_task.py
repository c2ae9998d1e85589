"""`etude new-task`: a file that runs, for robots that it has never seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import mujoco
import numpy as np
import pytest

from etude import mj
from etude.cli import main as cli
from etude.cli.target import env_config
from etude.core.keys import Key
from etude.envs.adapters.gym_native import ASSETS
from etude.envs.mujoco.decor import decorated, frame
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.simulation import model_file
from etude.envs.mujoco.survey import SAG, Survey
from etude.envs.robots.go1 import MODEL

SCENE = """<mujoco><include file="go1.xml"/><worldbody>
<geom name="floor" type="plane" size="0 0 .05" contype="0" conaffinity="1"/></worldbody></mujoco>"""


@pytest.mark.parametrize(
    ("robot", "name"), [("ant", "Ant"), ("humanoid", "Humanoid"), ("pusher_v5", "PusherV5")]
)
def test_the_file_passes_the_check_as_it_is(
    robot: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.py"
    assert cli.main(["new-task", str(ASSETS / f"{robot}.xml"), "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert f"the task {name}" in said
    assert "It passes etude check." in said


@pytest.fixture
def menagerie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of MuJoCo Menagerie that has one robot."""
    pytest.importorskip("mujoco_menagerie")
    folder = tmp_path / "menagerie" / "unitree_go1"
    folder.mkdir(parents=True)
    shutil.copy(MODEL, folder / "go1.xml")
    (folder / "scene.xml").write_text(SCENE)
    monkeypatch.setenv("MENAGERIE_ROOT", str(folder.parent))
    return folder


def test_a_robot_of_menagerie_is_named(menagerie: Path, tmp_path: Path) -> None:
    assert model_file("unitree_go1") == menagerie / "scene.xml"
    assert model_file("unitree_go1/go1") == menagerie / "go1.xml"
    file = tmp_path / "task.py"
    assert cli.main(["new-task", "unitree_go1", "--out", str(file)]) == 0
    assert 'ROBOT = "unitree_go1"' in file.read_text()
    assert cli.main(["check", f"{file}:UnitreeGo1", "--steps", "40"]) == 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("unitree_go5", "no robot unitree_go5 in MuJoCo Menagerie. Did you mean unitree_go1?"),
        ("unitree_a1", "MuJoCo Menagerie cannot give unitree_a1: "),
        ("unitree_go1/nosuch", "available: go1, scene"),
        ("unitree_go1.xml", "There is no model file unitree_go1.xml."),
    ],
)
def test_what_is_not_there_is_said(
    name: str, sentence: str, menagerie: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["new-task", name]) == 2
    assert sentence in capsys.readouterr().err


def test_the_package_that_would_know_a_name_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mujoco_menagerie", None)
    assert cli.main(["new-task", "unitree_go1"]) == 2
    assert "pip install mujoco-menagerie" in capsys.readouterr().err


BODIES = """
    <body name="torso" pos="0 0 {height}">
      {root}
      <geom type="box" size=".2 .12 .05" mass="4"/>
      {legs}
    </body>"""
LEG = """
      <body name="leg_{n}" pos="{x} {y} 0">
        <joint name="hip_{n}" axis="0 1 0" range="-60 60"/>
        <geom type="capsule" fromto="0 0 0 0 0 -.3" size=".02" mass=".3"/>
        <geom type="sphere" size=".03" pos="0 0 -.3" mass=".05"/>
      </body>"""
ARM = """
    <body name="upper" pos="0 0 .1">
      <joint name="shoulder" axis="0 1 0" range="-90 90" {limit}/>
      <geom type="capsule" fromto="0 0 0 0 0 .4" size=".02" mass="2"/>
      <body name="lower" pos="0 0 .4">
        <joint name="elbow" axis="0 1 0" range="-120 120" armature=".3"/>
        <geom type="capsule" fromto="0 0 0 .3 0 0" size=".02" mass="1"/>
        <site name="gripper" pos=".3 0 0"/>
      </body>
    </body>"""


def quadruped(height: float = 0.5, floor: bool = False, gravity: bool = False) -> str:
    corners = [(x, y) for x in (-0.2, 0.2) for y in (-0.12, 0.12)]
    legs = "".join(LEG.format(n=n, x=x, y=y) for n, (x, y) in enumerate(corners))
    bodies = BODIES.format(height=height, root="<freejoint/>", legs=legs)
    plane = '<geom name="floor" type="plane" size="0 0 1"/>' * floor
    option = "" if gravity else '<option gravity="0 0 0"/>'
    return f"<mujoco>{option}<worldbody>{plane}{bodies}</worldbody></mujoco>"


def arm(limit: str = "", actuators: str = "") -> str:
    worldbody = f"<worldbody>{ARM.format(limit=limit)}</worldbody>"
    return f"<mujoco>{worldbody}<actuator>{actuators}</actuator></mujoco>"


def written(
    mjcf: str, folder: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0
) -> tuple[str, MujocoEnv | None]:
    """What `etude new-task` prints for a model, and four environments of the task."""
    (folder / "walker.xml").write_text(mjcf)
    file = folder / "walker.py"
    arguments = ["new-task", str(folder / "walker.xml"), "--out", str(file), "--force", *words]
    assert cli.main(arguments) == code
    lines = [line for line in file.read_text().splitlines() if not line.startswith("ROBOT =")]
    assert max(map(len, lines)) <= 100
    if code:
        return capsys.readouterr().out, None
    env = env_config(f"{file}:Walker", {}).build_unchecked(4)
    assert isinstance(env, MujocoEnv)
    env.reset(Key(0))
    return capsys.readouterr().out, env


def test_joints_without_actuators_get_servos_from_their_inertia(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--frequency", "3", "--damping-ratio", "0.5")
    said, env = written(arm(), tmp_path, capsys, *words)
    assert env is not None
    assert "every joint gets a position servo of 3 Hz and damping ratio 0.5" in said
    model, data = env.simulation.model, mujoco.MjData(env.simulation.model)
    mujoco.mj_forward(model, data)
    mass = np.zeros((2, 2))
    mujoco.mj_fullM(model, data, mass)
    inertia, w = mass.diagonal(), 2 * np.pi * 3
    # The elbow: a rod of 1 kg and 30 cm about its end, with its caps, and the armature.
    assert inertia[1] == pytest.approx(0.3 + 0.09 / 3, rel=0.1)
    np.testing.assert_allclose(model.actuator_gainprm[:, 0], inertia * w**2, rtol=0.01)
    np.testing.assert_allclose(model.dof_damping, 2 * 0.5 * inertia * w, rtol=0.01)
    np.testing.assert_array_equal(model.actuator_biasprm[:, 2], 0.0)


def test_a_soft_servo_is_stiffened_for_its_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, env = written(arm(), tmp_path, capsys, "--frequency", "0.1")
    assert env is not None
    # Stretched out, the shoulder holds 2 kg at 20 cm and 1 kg at up to 55 cm.
    load = 9.81 * (2 * 0.2 + 1 * 0.55)
    stiffness = env.simulation.model.actuator_gainprm[0, 0]
    assert 0.8 * load / SAG < stiffness <= 1.001 * load / SAG


@pytest.mark.parametrize(
    ("mjcf", "words", "limit", "warned"),
    [
        (arm('actuatorfrcrange="-7 7"'), (), 7.0, "elbow"),
        (
            arm("", '<motor joint="shoulder" gear="3" ctrlrange="-2 2"/>'),
            ("--servos",),
            6.0,
            "elbow",
        ),
        (
            arm("", '<position joint="shoulder" kp="9" forcerange="-8 8"/>'),
            ("--servos",),
            8.0,
            "elbow",
        ),
        (arm(), (), None, "any joint"),
    ],
)
def test_torque_limits_are_those_of_the_file_or_derived_with_a_warning(
    mjcf: str,
    words: tuple[str, ...],
    limit: float | None,
    warned: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said, env = written(mjcf, tmp_path, capsys, *words)
    assert env is not None
    assert f"Warning: the model gives no torque limit for {warned};" in said
    model = env.simulation.model
    assert model.actuator_forcelimited.all()
    found = model.actuator_forcerange[:, 1]
    if limit is not None:
        assert found[0] == limit
    else:  # More than the load, and not beyond measure.
        assert 9.0 < found[0] < 100.0


def test_a_floor_and_gravity_are_added_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, env = written(quadruped(), tmp_path, capsys)
    assert env is not None
    assert "walker.xml has no gravity: the task adds 9.81 m/s^2." in said
    assert "walker.xml has no floor: the task adds one." in said
    assert "torso starts 17.0 cm above the floor" in said
    feet = env.simulation.model.geom_type == int(mujoco.mjtGeom.mjGEOM_SPHERE)
    places = env.simulation.bind("geom_xpos")
    env.simulation.forward()
    lowest = places[:, feet, 2].min() - 0.03
    assert abs(lowest) < 0.02
    for _ in range(100):  # It stands on its servos.
        result = env.step(np.zeros((4, 4)))
    assert not env.episode.any(), result
    assert env.simulation.bind("qpos")[:, 2].min() > 0.25


def test_a_floor_and_gravity_of_the_file_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said, env = written(quadruped(0.33, floor=True, gravity=True), tmp_path, capsys)
    assert env is not None
    assert "no floor" not in said
    assert "no gravity" not in said
    assert "moves it onto" not in said
    assert env.simulation.model.opt.gravity[2] == -9.81
    assert (env.simulation.model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE).sum() == 1


def test_the_target_is_in_the_scene_and_the_whole_robot_in_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for mjcf, kind in ((quadruped(), mj.WalkTarget), (arm(), mj.ReachTarget)):
        (folder := tmp_path / kind.__name__).mkdir()
        _, env = written(mjcf, folder, capsys)
        assert env is not None
        target = env.ability(kind)
        assert target is not None
        model = decorated(env)
        (shown,) = env.markers(0)
        assert isinstance(shown, mj.Target)
        data = mujoco.MjData(model)
        state = int(mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_setState(model, data, env.simulation.state[0], state)
        mujoco.mj_forward(model, data)
        np.testing.assert_array_equal(shown.position, target.position[0])
        place = frame(env.task.camera, model)
        points = [*data.geom_xpos[model.geom_bodyid > 0], target.position[0]]
        # Half of the field of view of 45 degrees, vertically.
        furthest = np.linalg.norm(np.array(points) - place.look_at, axis=1).max()
        assert furthest < 0.6 * place.distance


def test_a_task_that_fails_its_check_is_written_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stiff = '<position joint="elbow" kp="1e9"/>'
    said, _ = written(arm("", stiff), tmp_path, capsys, code=1)
    assert "which fails its check:" in said
    assert "huge at joint elbow" in said or "huge at joint shoulder" in said
    assert "--servos" in said
    assert "Next:" not in said
    assert (tmp_path / "walker.py").exists()


def test_motors_are_named_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    motors = "".join(f'<motor joint="{j}" ctrlrange="-1 1"/>' for j in ("shoulder", "elbow"))
    said, env = written(arm("", motors), tmp_path, capsys)
    assert env is not None
    assert "actions are torques: --servos replaces them" in said
    assert env.simulation.model.actuator_gainprm[0, 0] == 1.0


def test_the_home_pose_is_in_range_and_above_the_feet() -> None:
    """Knees that cannot be straight put the feet behind the hips; the hips make up for it."""
    knee = LEG.replace('size=".02" mass=".3"/>', 'size=".02" mass=".3" contype="0"/>').replace(
        '<geom type="sphere" size=".03" pos="0 0 -.3" mass=".05"/>',
        '<body pos="0 0 -.3"><joint name="knee_{n}" axis="0 1 0" range="30 90"/>'
        '<geom type="sphere" size=".03" pos="0 0 -.3" mass=".05"/></body>',
    )
    corners = [(x, y) for x in (-0.2, 0.2) for y in (-0.12, 0.12)]
    legs = "".join(knee.format(n=n, x=x, y=y) for n, (x, y) in enumerate(corners))
    bodies = BODIES.format(height=1.0, root="<freejoint/>", legs=legs)
    survey = Survey(
        mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>")
    )
    joints = survey.home[7:]
    assert (np.rad2deg(joints[1::2]) >= 29.99).all()
    assert (np.rad2deg(joints[::2]) < -5).all()
    assert len(survey.feet) == 4


def test_servos_get_an_implicit_integrator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """RK4 integrates the damping of joints explicitly, and light chains diverge."""
    explicit = arm().replace("<mujoco>", '<mujoco><option integrator="RK4"/>')
    said, env = written(explicit, tmp_path, capsys)
    assert env is not None
    assert "has the integrator RK4: the task has implicitfast for servos." in said
    implicit = int(mujoco.mjtIntegrator.mjINT_IMPLICITFAST)
    assert int(env.simulation.model.opt.integrator) == implicit


def test_a_model_that_cannot_move_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "box.xml").write_text(
        '<mujoco><worldbody><body><geom size="1"/></body></worldbody></mujoco>'
    )
    assert cli.main(["new-task", str(tmp_path / "box.xml")]) == 2
    assert "has neither hinges, slides nor actuators" in capsys.readouterr().err


def test_joints_that_follow_another_get_no_servo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follows = arm().replace(
        "<actuator>", '<equality><joint joint1="elbow" joint2="shoulder"/></equality><actuator>'
    )
    _, env = written(follows, tmp_path, capsys)
    assert env is not None
    assert env.spec.action.low == (-1.0,)


GRIPPER = """
        <body name="driver" pos=".3 0 0">
          <joint name="driver" axis="0 1 0" range="-60 60"/>
          <geom type="capsule" fromto="0 0 0 0 0 .1" size=".01" mass=".1"/>
          <body name="coupler" pos="0 0 .1">
            <joint name="coupler" axis="0 1 0"/>
            <geom type="capsule" fromto="0 0 0 .1 0 0" size=".01" mass=".1"/>
          </body>
        </body>
        <body name="rocker" pos=".4 0 0">
          <joint name="rocker" axis="0 1 0"/>
          <geom type="capsule" fromto="0 0 0 0 0 .1" size=".01" mass=".1"/>
        </body>
        <site name="gripper" """
CLOSED = """<contact><exclude body1="coupler" body2="rocker"/></contact>
    <equality><connect body1="coupler" body2="rocker" anchor=".1 0 0"/></equality>"""
SPLIT = '<tendon><fixed name="split"><joint joint="driver" coef="1"/></fixed></tendon>'


@pytest.mark.parametrize(
    "driver", ['<motor joint="driver" gear=".1"/>', '<motor tendon="split" gear=".1"/>']
)
def test_joints_that_close_a_loop_stay_passive(
    driver: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    motors = f'<motor joint="shoulder"/><motor joint="elbow"/>{driver}'
    model = arm(actuators=motors).replace('<site name="gripper" ', GRIPPER)
    model = model.replace("<actuator>", f"{CLOSED}{SPLIT}<actuator>")
    moved = Survey(mujoco.MjModel.from_xml_string(model)).joints
    assert moved == [0, 1, 2]  # shoulder, elbow and driver: not coupler and rocker
    _, env = written(model, tmp_path, capsys)
    assert env is not None
    qpos = env.simulation.bind("qpos")
    assert (qpos[:, 2] != 0.0).all()
    np.testing.assert_array_equal(qpos[:, 3:], 0.0)


def test_joints_of_a_loop_without_actuators_get_servos() -> None:
    model = (
        arm().replace('<site name="gripper" ', GRIPPER).replace("<actuator>", f"{CLOSED}<actuator>")
    )
    assert Survey(mujoco.MjModel.from_xml_string(model)).joints == [0, 1, 2, 3, 4]


def test_a_scene_in_a_folder_of_assets_is_named_after_its_robot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scene = tmp_path / "gym_arm" / "assets" / "scene.xml"
    scene.parent.mkdir(parents=True)
    scene.write_text(arm(actuators='<motor joint="elbow"/>'))
    assert cli.main(["new-task", str(scene)]) == 0
    assert "the task GymArm" in capsys.readouterr().out
    assert (tmp_path / "gym_arm_task.py").exists()
