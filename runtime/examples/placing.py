"""An arm that picks up a cube and puts it down, in plain MuJoCo: measures, acts, and is judged."""

from __future__ import annotations

import mujoco
import numpy as np

from etude_runtime import ContractError, Policy

AWAY, LIFTED, PRESS, NEAR, SLOW = 0.06, 0.02, 0.5, 0.035, 0.05
"""m, m, N, m, m/s: when the hand is away, a cube lifted, pressed, between the fingers, at rest."""


class Placing:
    """One arm. What it senses and does is taken from the policy's contract alone."""

    def __init__(self, policy: Policy, model: mujoco.MjModel) -> None:
        document = policy.document
        self.model, self.data, self.policy = model, mujoco.MjData(model), policy
        self._action, self._task = document["action"], document["task"]
        self._env = document["run"]["env"]
        if self._action["kind"] not in ("kuka_hand", "kuka_hand_turn"):
            raise ContractError(f"This example moves a hand, not {self._action['kind']}.")
        names = self._action["joints"]
        policy.check_joints(names)
        joints = {joint["name"]: joint for joint in document["joints"]}
        self._home = np.array([joints[name]["default"] for name in names])
        self._low, self._high = np.array([joints[name]["range"] for name in names]).T
        self._speed = np.array(self._action["speed_limit"])
        self._arm = [int(model.joint(name).qposadr[0]) for name in names]
        self._servos = [model.actuator(name).id for name in names]
        fingers = self._action["fingers"]
        self._fingers = [int(model.joint(name).qposadr[0]) for name in fingers]
        self._finger_servos = [model.actuator(name).id for name in fingers]
        self._forces = [int(model.sensor(name).adr[0]) for name in fingers]
        self._site, self._cube = model.site("hand").id, model.body("cube").id
        self._cube_pose = int(model.joint("cube").qposadr[0])
        self._cube_speed = int(model.joint("cube").dofadr[0])
        self._cube_geom = model.geom("cube").id
        links = {model.joint(name).bodyid[0] for name in names} | {model.body("palm").id}
        self._links = [g for g in range(model.ngeom) if model.geom_bodyid[g] in links]
        self.period = policy.period or 0.0
        self._substeps = round(self.period / model.opt.timestep)
        self.max_steps = document["control"]["max_episode_steps"]
        self._keys = [term.key for term in policy.contract.terms]
        self._jacobian = np.zeros((6, model.nv))

    def reset(self, rng: np.random.Generator) -> None:
        """The arm near its home, the cube and its target somewhere in their areas."""
        data, env, task = self.data, self._env, self._task
        mujoco.mj_resetData(self.model, data)
        jitter = rng.uniform(-1.0, 1.0, self._home.size) * env["start_jitter"]
        data.qpos[self._arm] = data.ctrl[self._servos] = self._home + jitter
        open_ = self._action["stroke"] / 2
        data.qpos[self._fingers] = data.ctrl[self._finger_servos] = open_
        center = np.array([env["cube_center"], env["target_center"]]) + task["table_center"][:2]
        area = np.array([env["cube_area"], env["target_area"]])
        while True:
            cube, target = center + (rng.random((2, 2)) - 0.5) * area
            if np.linalg.norm(cube - target) >= env["min_distance"]:
                break
        half = rng.uniform(-1.0, 1.0) * env["cube_turn"] / 2
        pose = [*cube, task["rest_height"], np.cos(half), 0.0, 0.0, np.sin(half)]
        data.qpos[self._cube_pose : self._cube_pose + 7] = pose
        self.target = np.array([*target, task["rest_height"]])
        mujoco.mj_forward(self.model, data)
        self._command, self._last_hand = 1.0, data.site_xpos[self._site].copy()
        self._touch, self._held, self.step = np.zeros(2), False, 0
        self._velocity = np.zeros(3)
        self._carried, self._rested = False, 0
        self.policy.reset()

    @property
    def _frame(self) -> np.ndarray:
        return self.data.site_xmat[self._site].reshape(3, 3)

    def _yaw(self) -> float:
        return float(np.arctan2(-self._frame[1, 0], -self._frame[0, 0]))

    def sense(self) -> dict[str, np.ndarray]:
        """Every term of the contract, in its unit."""
        data, task = self.data, self._task
        hand, cube = data.site_xpos[self._site], data.xpos[self._cube]
        frame, yaw = data.xmat[self._cube].reshape(3, 3), self._yaw()
        # A cube may lie on any face: the yaw of whichever of two edges is the more horizontal.
        edge = frame[:2, 0] if abs(frame[2, 0]) < 0.7 else frame[:2, 1]
        turn = 4.0 * (np.arctan2(edge[1], edge[0]) - yaw)
        offset = self.target - cube
        near = (offset[:2] ** 2).sum() / task["near_target"] ** 2 + (offset[2] / task["low"]) ** 2
        opening = data.qpos[self._fingers].sum() / self._action["stroke"]
        measured = {
            "hand_position": hand - task["table_center"],
            "hand_velocity": self._velocity,
            "hand_turn": np.array([np.cos(2.0 * yaw), np.sin(2.0 * yaw)]),
            "gripper": np.array([opening, self._command, *self._touch]),
            "cube_offset": cube - hand,
            "cube_velocity": data.qvel[self._cube_speed : self._cube_speed + 3],
            "cube_turn": np.array([np.cos(turn), np.sin(turn), np.abs(frame[2]).max()]),
            "target_offset": offset,
            "hand_to_target": self.target - hand,
            "at_target": np.exp([-near]),
        }
        return {key: measured[key] for key in self._keys}

    def control(self) -> bool:
        """One control step; whether the cube has left the table."""
        data, said = self.data, self._action
        action = self.policy.act(self.sense()).astype(np.float64)
        turns = said["kind"] == "kuka_hand_turn"
        yaw = self._yaw() + action[3] * said["turn_step"] if turns else 0.0
        data.ctrl[self._servos] = self._joint_targets(action[:3] * said["reach_step"], yaw)
        self._command = 1.0 if action[-1] > 0.0 else -1.0
        ahead = data.qpos[self._fingers].mean() + self._command * said["finger_step"]
        data.ctrl[self._finger_servos] = np.clip(ahead, 0.0, said["stroke"] / 2)
        mujoco.mj_step(self.model, data, self._substeps)
        forces = np.stack([data.sensordata[i : i + 3].copy() for i in self._forces])
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_comPos(self.model, data)
        hand = data.site_xpos[self._site]
        self._velocity = (hand - self._last_hand) / self.period
        self._last_hand = hand.copy()
        self.step += 1
        self._judge(forces)
        return bool(data.xpos[self._cube, 2] - self._task["rest_height"] < -0.03)

    def _joint_targets(self, displacement: np.ndarray, yaw: float) -> np.ndarray:
        """Damped least squares: the hand moves so far, keeps pointing down, and turns to `yaw`."""
        said, jacobian, joints = self._action, self._jacobian, self._home.size
        mujoco.mj_jacSite(self.model, self.data, jacobian[:3], jacobian[3:], self._site)
        own = jacobian[:, :joints]
        c, s = np.cos(yaw), np.sin(yaw)
        down = np.array([[-c, -s, 0.0], [-s, c, 0.0], [0.0, 0.0, -1.0]])
        turn = down @ self._frame.T
        turned = [turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]]
        position = self.data.qpos[self._arm]
        posture = (self._home - position) * said["posture"]
        error = np.concatenate([displacement, np.array(turned) * 0.5]) - own @ posture
        square = own @ own.T + said["damping"] ** 2 * np.eye(6)
        step = posture + own.T @ np.linalg.solve(square, error)
        step /= max(float((np.abs(step) / (self._speed * self.period)).max()), 1.0)
        return np.clip(position + step, self._low, self._high)

    def _judge(self, forces: np.ndarray) -> None:
        """Held, carried, and at rest in the target with the hand away."""
        data, task = self.data, self._task
        cube, hand = data.xpos[self._cube], data.site_xpos[self._site]
        height, distance = cube[2] - task["rest_height"], float(np.linalg.norm(cube - hand))
        self._touch = (np.linalg.norm(forces, axis=1) > task["touch_force"]).astype(np.float64)
        closing = forces @ self._frame[:, 1]
        held = closing[0] < -PRESS and closing[1] > PRESS and distance < NEAR
        inside = np.linalg.norm((self.target - cube)[:2]) <= task["radius"]
        down = height < task["low"]
        left = down and not held and not inside
        self._carried = (self._carried or (held and height > LIFTED)) and not left
        still = np.abs(data.qvel[self._cube_speed : self._cube_speed + 6]).max() < SLOW
        rests = self._carried and inside and height < 0.002 and still and not self._touch.any()
        self._rested = self._rested + 1 if rests and distance > AWAY and self._is_clear() else 0

    def _is_clear(self) -> bool:
        """Whether palm and links are away from the cube's centre."""
        size = self.model.geom_size[self._cube_geom, 0]
        found = (
            mujoco.mj_geomDistance(self.model, self.data, self._cube_geom, link, 0.2, None) + size
            for link in self._links
        )
        return min(found) > AWAY

    def episode(self, rng: np.random.Generator) -> bool:
        """Whether the cube came to rest in the target, let go of."""
        self.reset(rng)
        while self.step < self.max_steps:
            if self.control():
                return False
            if self._rested >= 2:
                return True
        return False
