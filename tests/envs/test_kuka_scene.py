from __future__ import annotations

import json
from importlib import resources
from typing import Any

import mujoco
import numpy as np
import pytest

from etude.envs.robots.kuka import (
    FINGERS,
    HAND_SITE,
    OBJECT_COLLISION,
    RESPONSE,
    STROKE,
    arm_table,
    kuka_spec,
)

HOME = np.array([0.0, 0.38, 0.0, -1.28, 0.0, 1.48, 0.0])


def raw_table() -> dict[str, Any]:
    text = (resources.files("etude.envs.robots.kuka") / "assets/iiwa14.json").read_text("utf-8")
    return dict(json.loads(text))


def matrix(quaternion: list[float]) -> np.ndarray:
    """Rotation matrix of a quaternion w x y z of any length."""
    w, *v = np.array(quaternion) / np.linalg.norm(quaternion)
    x, y, z = v
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + 2 * w * cross + 2 * cross @ cross


def turn(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])


def forward_kinematics(angles: np.ndarray) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Link origins, flange position and flange rotation, from the table alone."""
    table = raw_table()
    position, rotation, origins = np.zeros(3), np.eye(3), []
    for link, angle in zip(table["links"], angles, strict=True):
        position = position + rotation @ np.array(link["pos"])
        rotation = rotation @ matrix(link["quat"]) @ turn(angle)
        origins.append(position)
    return origins, position + rotation @ np.array(table["flange_site_on_link7"]), rotation


@pytest.mark.parametrize("fingers", ["sliding", "locked"])
def test_forward_kinematics_agrees_with_the_table(fingers: Any) -> None:
    model = kuka_spec(fingers=fingers).compile()
    data = mujoco.MjData(model)
    limits = arm_table().range
    stream = np.random.default_rng(0)
    hand_height = 0.138
    for _ in range(200):
        angles = stream.uniform(limits[:, 0], limits[:, 1])
        data.qpos[:7] = angles
        mujoco.mj_kinematics(model, data)
        origins, flange, rotation = forward_kinematics(angles)
        for index, origin in enumerate(origins):
            found = data.body(f"link{index + 1}").xpos
            np.testing.assert_allclose(found, origin, rtol=0, atol=1e-9)
        hand = flange + rotation @ [0, 0, hand_height]
        np.testing.assert_allclose(data.site(HAND_SITE).xpos, hand, rtol=0, atol=1e-9)
        found = data.site(HAND_SITE).xmat.reshape(3, 3)
        np.testing.assert_allclose(found, rotation, rtol=0, atol=1e-9)


def test_masses_and_limits_are_those_of_the_table() -> None:
    model = kuka_spec().compile()
    for index, link in enumerate(raw_table()["links"]):
        body = model.body(link["name"])
        assert body.mass[0] == link["mass"]
        np.testing.assert_allclose(body.ipos, link["com"])
        np.testing.assert_allclose(np.sort(body.inertia), np.sort(link["diaginertia"]))
        joint = model.joint(f"joint{index + 1}")
        np.testing.assert_allclose(joint.range, link["range_rad"])
        np.testing.assert_allclose(joint.axis, [0, 0, 1])
        servo = model.actuator(f"joint{index + 1}")
        np.testing.assert_allclose(servo.ctrlrange, link["range_rad"])
        np.testing.assert_allclose(servo.forcerange, [-link["torque_nm"], link["torque_nm"]])
        assert servo.gainprm[0] == -servo.biasprm[1]
        assert servo.biasprm[2] == 0.0
        damping = model.dof_damping[model.joint(f"joint{index + 1}").dofadr[0]]
        assert damping == pytest.approx(servo.gainprm[0] * RESPONSE)
        assert damping * np.deg2rad(link["speed_deg_s"]) == pytest.approx(link["torque_nm"])


@pytest.mark.parametrize("integrator", ["mjINT_IMPLICITFAST", "mjINT_DISCRETE"])
@pytest.mark.parametrize("fingers", ["sliding", "locked"])
def test_saturated_servos_keep_to_their_torque_and_the_arm_to_its_speed(
    fingers: Any, integrator: str
) -> None:
    """Targets anywhere in the range, new ones before the old are reached."""
    spec = kuka_spec(fingers=fingers, timestep=0.0125)
    spec.option.integrator = getattr(mujoco.mjtIntegrator, integrator)
    model = spec.compile()
    data, table = mujoco.MjData(model), arm_table()
    data.qpos[:7] = data.ctrl[:7] = HOME
    stream, saturated = np.random.default_rng(0), np.zeros(7, np.bool_)
    for _ in range(100):
        data.ctrl[:7] = stream.uniform(*table.range.T)
        for _ in range(8):
            mujoco.mj_step(model, data)
            force = np.abs(data.actuator_force[:7])
            assert (force <= table.torque).all()
            saturated |= force == table.torque
            assert (np.abs(data.qvel[:7]) < 3.0 * table.speed).all()
    assert saturated.all()
    data.ctrl[:7] = HOME
    for _ in range(400):
        mujoco.mj_step(model, data)
    np.testing.assert_allclose(data.qpos[:7], HOME, rtol=0, atol=1e-3)
    np.testing.assert_allclose(data.qvel[:7], 0.0, atol=1e-2)


def run(spec: Any, steps: int = 100) -> np.ndarray:
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = HOME
    data.ctrl[:7] = HOME + 0.2
    trace = []
    for _ in range(steps):
        mujoco.mj_step(model, data)
        trace.append(data.qpos[:7].copy())
    return np.array(trace)


def test_shortcuts_for_speed_change_no_physics() -> None:
    """Fused bodies and switched-off gravity move as separate, compensated bodies do."""
    plain = kuka_spec(fingers="locked")
    plain.compiler.fusestatic = False
    plain.option.disableflags = 0
    np.testing.assert_allclose(run(kuka_spec(fingers="locked")), run(plain), rtol=0, atol=1e-9)


def test_arm_does_not_sag_under_gravity() -> None:
    model = kuka_spec(collisions=True).compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = data.ctrl[:7] = HOME
    mujoco.mj_step(model, data, 200)
    np.testing.assert_allclose(data.qpos[:7], HOME, rtol=0, atol=1e-4)


def test_fingers_open_alike_over_the_whole_stroke() -> None:
    model = kuka_spec().compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = data.ctrl[:7] = HOME
    for opening in (STROKE, 0.03, 0.0):
        for finger in FINGERS:
            data.actuator(finger).ctrl = opening / 2
        for _ in range(50):
            mujoco.mj_step(model, data)
            left, right = (data.joint(finger).qpos[0] for finger in FINGERS)
            assert left == pytest.approx(right, abs=1e-3)
        assert left + right == pytest.approx(opening, abs=1e-3)
        tips = [data.geom(finger).xpos for finger in FINGERS]
        gap = np.linalg.norm(tips[0] - tips[1])
        assert gap == pytest.approx(opening + 0.012, abs=1e-3)


def test_hand_touches_objects_a_task_adds() -> None:
    spec = kuka_spec(collisions=True)
    table = {"type": mujoco.mjtGeom.mjGEOM_BOX, "size": [0.4, 0.4, 0.02]}
    spec.worldbody.add_geom(name="table", pos=[0.55, 0, 0.42], **table, **OBJECT_COLLISION)
    model = spec.compile()
    data = mujoco.MjData(model)
    data.qpos[:7] = HOME
    mujoco.mj_forward(model, data)
    assert data.ncon > 0
    pairs = {(model.geom(c.geom1).name, model.geom(c.geom2).name) for c in data.contact}
    assert all("table" in pair for pair in pairs), "the arm must not touch itself"
