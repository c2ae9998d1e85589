"""Arm, cube and target of pick-and-place: actions, contacts and progress; control of the hand."""

from __future__ import annotations

import mujoco
import numpy as np

from etude.core.contracts import Array
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.envs.mujoco.simulation import Simulation
from etude.envs.mujoco.task import Action, Draws
from etude.envs.robots.kuka import (
    FINGERS,
    HAND_SITE,
    STROKE,
    ArmTable,
    Clearance,
    arm_table,
    joint_names,
)
from etude.tasks.pick_place.scene import (
    CONTROL_SECONDS,
    CUBE,
    CUBE_HALF,
    REST_HEIGHT,
    TABLE_CENTER,
    PickPlaceOptions,
)

STAGES = ("reach", "align", "grasp", "carry", "place", "release", "clear")
"""Stages of the staged potential; each is a reward term."""
TENT = 0.05
"""Height above the table for carrying the cube, and above the cube for approaching it, m."""
CLEAR = 0.06
"""Distance from the cube's centre at which hand, palm and links count as away, m."""
_CORNER = CUBE_HALF * 3**0.5
"""Distance of the cube's corners from its centre, m: what is farther away cannot touch it."""
LOW = 0.008
"""Largest height above the table at which a cube counts as put down, m."""
NEAR_TARGET = 0.03
"""Length scale of the observation `at_target`, m."""
DROPPED = 0.02
"""A cube released from higher than this counts as dropped, m."""
GUESS = (0.0, 0.5, 0.0, -1.5, 0.0, 1.2, 0.0)
"""Initial joint angles for solving the home posture, rad: elbow up, hand down."""
START_HEIGHT = 0.18
"""Initial height of the hand above the table, m."""
FINGER_STEP = 0.01
"""Distance from the fingers to their targets, m: they press with 10 N each when blocked by the
cube, and move at up to 0.25 m/s."""
_PRESS = 0.5
"""Force of a finger that counts as holding, N: half of the cube's weight."""
_TOUCH = 0.01
"""Force that counts as touching, N."""
_NEAR = 0.035
"""Distance from hand to cube at which the cube is between the fingers, m."""
_LIFTED = 0.02
"""Height above the table that counts as lifted, m."""
_SLOW = 0.05
"""Largest velocity of a cube at rest, m/s and rad/s."""
_REST_STEPS = 2
"""Consecutive control steps for which the cube must be at rest."""


class PickPlaceArm(Action):
    """Actions: [num_envs, n] in [-1, 1]; the last controls the gripper, open if positive.

    "hand": displacement of the hand in x, y, z, pointing down with yaw 0. "hand-turn": displacement
    and change of yaw. "joint": displacements of the seven joints. All are relative to the current
    pose.
    """

    def __init__(self, config: PickPlaceOptions) -> None:
        super().__init__()
        self._config = config
        # Undiscounted sums of rewards are not shaped: shaping would reward running out of time.
        self._shaping = config.shaping if config.shaping_discount() is not None else 0.0
        self._level = 1.0

    def bind(self) -> None:
        simulation, table, config = self.env.simulation, arm_table(), self._config
        joints = len(table.names)
        self.size = {"hand": 3, "hand-turn": 4, "joint": joints}[config.control] + 1
        start = TABLE_CENTER + np.array([0.0, 0.0, START_HEIGHT])
        self._home = solve_pose(simulation.model, np.array(GUESS), start, 0.0)
        self._hand_control = HandControl(simulation, table, self._home)
        self._clearance = Clearance(simulation)
        self._speed = table.speed * (config.joint_speed * CONTROL_SECONDS)
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        cube, body = joints + len(FINGERS), simulation.model.body(CUBE).id
        qpos, control = simulation.bind("qpos"), simulation.bind("ctrl")
        self._joint_control, self._finger_control = control[:, :joints], control[:, joints:]
        self._fingers, self._cube_pose = qpos[:, joints:cube], qpos[:, cube : cube + 7]
        self._cube_frame = simulation.bind("xmat")[:, body].reshape(-1, 3, 3)
        self._forces = simulation.bind("sensordata").reshape(-1, len(FINGERS), 3)
        self.joint_position: Array = qpos[:, :joints]
        """[num_envs, 7] rad."""
        self.hand: Array = simulation.site(HAND_SITE)
        """[num_envs, 3] m: the point between the fingertips."""
        self.cube: Array = simulation.bind("xpos")[:, body]
        """[num_envs, 3] m: the cube's centre."""
        self.cube_velocity: Array = simulation.bind("qvel")[:, cube : cube + 6]
        """[num_envs, 6] m/s and rad/s."""
        self._bind_state()
        self._bind_derived()

    def _bind_state(self) -> None:
        """State that the next step depends on."""
        env = self.env
        self.target = env.state("target", 3)
        """[num_envs, 3] m: target of the cube's centre."""
        self._last_hand = env.state("hand", 3)
        self.hand_yaw = env.state("hand_yaw")
        """[num_envs] rad: yaw of the hand."""
        self.reached = env.state("reached", dtype="bool")
        """[num_envs] bool: the hand was around the cube in this episode."""
        self.lifted = env.state("lifted", dtype="bool")
        """[num_envs] bool: the cube was held off the table in this episode."""
        self.carried = env.state("carried", dtype="bool")
        """[num_envs] bool: lifted, and since then not released outside of the target."""
        self.rested = env.state("rested")
        """[num_envs]: consecutive control steps at rest in the target, with the hand away."""
        self.drop = env.state("drop")
        """[num_envs] m: height of the cube above the table when it was last held."""
        self.stages = env.state("stages", len(STAGES))
        """[num_envs, 7] from 0 to 1: the staged potential, see `STAGES`."""
        self.best_stages = env.state("best_stages", len(STAGES))
        """[num_envs, 7]: maximum of each stage in this episode."""

    def _bind_derived(self) -> None:
        num_envs = self.env.num_envs
        self.hand_velocity: Array = np.zeros((num_envs, 3))
        """[num_envs, 3] m/s: mean velocity of the hand over the last control step."""
        self.offset: Array = np.zeros((num_envs, 3))
        """[num_envs, 3] m: position of the cube from the hand."""
        self.gains: Array = np.zeros((num_envs, len(STAGES)))
        """[num_envs, 7]: reward of each stage for the last control step."""
        self.command: Array = np.ones(num_envs)
        """[num_envs]: current command of the gripper, 1 open or -1 closed."""
        numbers: Array = np.zeros((7, num_envs))
        self.cube_yaw, self.cube_level, self.opening = numbers[:3]
        """[num_envs]: yaw of a horizontal edge of the cube, rad; 1 if a face points up; distance
        between the fingers, m."""
        self.distance, self.clearance, self.height, self.error = numbers[3:]
        """[num_envs] m: from hand to cube; from the cube's centre to the nearest surface of palm
        and links; of the cube above the table; from cube to target, on the table."""
        self.touch: Array = np.zeros((num_envs, len(FINGERS)), np.bool_)
        """[num_envs, 2] bool: a finger touches the cube."""
        self.held, self.placed, self.success, self.fallen = np.zeros((4, num_envs), np.bool_)
        """[num_envs] bool: both fingers press on the cube from opposite sides; carried, and now
        down inside the target; the task is done; the cube has left the table."""

    def describe(self) -> Tree:
        config, table = self._config, arm_table()
        names = joint_names(table)
        relative = {
            "hand": {"reach_step": config.reach_step},
            "hand-turn": {"reach_step": config.reach_step, "turn_step": config.turn_step},
            "joint": {"joint_step": self._speed.tolist()},
        }[config.control]
        return {
            "default_pose": dict(zip(names, self._home.tolist(), strict=True)),
            "action": {
                "kind": f"kuka_{config.control.replace('-', '_')}",
                "about": "motion relative to where the hand or the joints are, then the gripper, "
                "open where positive: see docs/export.md for the controller",
                "joints": list(names),
                **relative,
                "speed_limit": table.speed.tolist(),
                "damping": DAMPING,
                "posture": POSTURE,
                "fingers": list(FINGERS),
                "finger_step": FINGER_STEP,
                "stroke": STROKE,
            },
            "task": {
                "table_center": TABLE_CENTER.tolist(),
                "rest_height": REST_HEIGHT,
                "near_target": NEAR_TARGET,
                "low": LOW,
                "touch_force": _TOUCH,
                "radius": config.radius,
            },
        }

    def follow(self, curriculum: Tree) -> None:
        """Scale the areas of cube and target, and the range of the cube's yaw, by the level."""
        self._level = float(curriculum.get("level", 1.0))
        config = self._config
        if config.widest(self._level) < 1.2 * config.min_distance:
            raise UsageError(
                f"At level {self._level:g} the areas of cube and target are too small for "
                f"env.min_distance {config.min_distance:g} m: raise curriculum.start."
            )

    def apply(self, actions: Array) -> None:
        config, actions = self._config, np.asarray(actions, np.float64)
        moves = actions[:, :-1]
        if config.control == "joint":
            target = self.joint_position + moves * self._speed
            np.minimum(np.maximum(target, self._low), self._high, out=self._joint_control)
        else:
            turns = config.control == "hand-turn"
            yaw = self.hand_yaw + moves[:, 3] * config.turn_step if turns else 0.0 * self.hand_yaw
            displacement = moves[:, :3] * config.reach_step
            self._joint_control[:] = self._hand_control.targets(displacement, yaw, CONTROL_SECONDS)
        np.copyto(self.command, np.where(actions[:, -1] > 0.0, 1.0, -1.0))
        # One target for both fingers, at a fixed distance from their mean: they move together and
        # centre the cube, and the distance limits their speed and force.
        ahead = self._fingers.mean(axis=1) + self.command * FINGER_STEP
        self._finger_control[:] = np.minimum(np.maximum(ahead, 0.0), STROKE / 2)[:, None]

    def update(self) -> None:
        np.divide(self.hand - self._last_hand, CONTROL_SECONDS, out=self.hand_velocity)
        self._last_hand[:] = self.hand
        self._update_geometry()
        self._update_contacts()
        self._update_progress()
        self._update_gains()

    def _update_geometry(self) -> None:
        """Update distances, heights and angles."""
        frame = self._cube_frame
        self.hand_yaw[:] = self._hand_control.yaw()
        self.opening[:] = self._fingers.sum(axis=1)
        np.subtract(self.cube, self.hand, out=self.offset)
        np.sqrt(np.einsum("ij,ij->i", self.offset, self.offset), out=self.distance)
        self.clearance[:] = self._clearance.of(self.cube)
        np.subtract(self.cube[:, 2], REST_HEIGHT, out=self.height)
        away = self.target - self.cube
        np.sqrt(away[:, 0] ** 2 + away[:, 1] ** 2, out=self.error)
        # The cube may lie on any face: use the yaw of the more horizontal of two edges.
        edge = np.where(np.abs(frame[:, 2, :1]) < 0.7, frame[:, :2, 0], frame[:, :2, 1])
        np.arctan2(edge[:, 1], edge[:, 0], out=self.cube_yaw)
        np.abs(frame[:, 2]).max(axis=1, out=self.cube_level)

    def _update_contacts(self) -> None:
        """Update contacts of the fingers and whether they hold the cube, from the contact
        forces."""
        forces = self._forces
        np.greater(np.einsum("ijk,ijk->ij", forces, forces), _TOUCH**2, out=self.touch)
        closing = np.einsum("ijk,ik->ij", forces, self._hand_control.frame[:, :, 1])
        # The left finger presses against the hand's second axis, the right one along it.
        pressed = (closing[:, 0] < -_PRESS) & (closing[:, 1] > _PRESS)
        np.logical_and(pressed, self.distance < _NEAR, out=self.held)

    def _update_progress(self) -> None:
        """Update the flags of progress: reached, lifted, carried, placed, success, fallen."""
        height = self.height
        inside = self.error <= self._config.radius
        down = height < LOW
        lifted = self.held & (height > _LIFTED)
        np.logical_or(self.reached, self.distance < _NEAR, out=self.reached)
        np.logical_or(self.lifted, lifted, out=self.lifted)
        # A cube released outside of the target must be lifted again: pushing it in does not count.
        left = down & ~self.held & ~inside
        np.copyto(self.carried, (self.carried | lifted) & ~left)
        np.logical_and(self.carried, inside & down, out=self.placed)
        np.copyto(self.drop, np.maximum(height, 0.0), where=self.held)
        still = np.abs(self.cube_velocity).max(axis=1) < _SLOW
        away = np.minimum(self.distance, self.clearance) > CLEAR
        rests = self.placed & released(self) & still & (height < 0.002) & away
        np.multiply(self.rested + 1.0, rests, out=self.rested)
        np.greater_equal(self.rested, _REST_STEPS, out=self.success)
        np.less(height, -0.03, out=self.fallen)

    def _update_gains(self) -> None:
        """Update the rewards of the stages: new maxima, and the change of the potential."""
        before = self.stages.copy()
        self.stages[:] = staged_potential(self)
        best = np.maximum(self.best_stages, self.stages)
        # The potential is 0 in terminal states, or it would add to the return. At a time limit it
        # stays, because the value is bootstrapped there.
        goes_on = ~(self.success | self.fallen)
        shaping = self._config.discount * self.stages * goes_on[:, None] - before
        np.add(best - self.best_stages, self._shaping * shaping, out=self.gains)
        self.best_stages[:] = best

    def reset(self, env_ids: Array, draws: Draws) -> None:
        config, count = self._config, self._home.size
        drawn = np.array([g.random(count + 1) for g in draws.generators]) * 2.0 - 1.0
        joints = self._home + drawn[:, :count] * config.start_jitter
        half_turn = drawn[:, count] * (config.cube_turn * self._level / 2)
        points = np.array([self._draw_points(generator) for generator in draws.generators])
        self.joint_position[env_ids] = self._joint_control[env_ids] = joints
        self._fingers[env_ids] = self._finger_control[env_ids] = STROKE / 2
        pose = np.zeros((env_ids.size, 7))
        pose[:, :2], pose[:, 2] = points[:, 0], REST_HEIGHT
        pose[:, 3], pose[:, 6] = np.cos(half_turn), np.sin(half_turn)
        self._cube_pose[env_ids] = pose
        self.target[env_ids, :2] = points[:, 1]
        self.target[env_ids, 2] = REST_HEIGHT

    def _draw_points(self, generator: np.random.Generator) -> Array:
        """Sample positions of cube and target, [2, 2] m, at least `min_distance` apart."""
        config = self._config
        center = np.array([config.cube_center, config.target_center]) + TABLE_CENTER[:2]
        area = np.array([config.cube_area, config.target_area]) * self._level
        while True:
            points: Array = center + (generator.random((2, 2)) - 0.5) * area
            if float(np.linalg.norm(points[0] - points[1])) >= config.min_distance:
                return points

    def begin(self, env_ids: Array, draws: Draws) -> None:
        history = (self.touch, self.held, self.reached, self.lifted, self.carried, self.placed)
        for flag in (*history, self.success, self.fallen):
            flag[env_ids] = False
        for number in (self.rested, self.drop, self.hand_velocity):
            number[env_ids] = 0.0
        self.command[env_ids] = 1.0
        self._last_hand[env_ids] = self.hand[env_ids]
        self._update_geometry()
        self.stages[env_ids] = self.best_stages[env_ids] = staged_potential(self)[env_ids]


def gentleness(arm: PickPlaceArm) -> Array:
    """[num_envs] from 0 to 1: 0.5 for a cube released 2 cm above the table.

    Without this factor a policy learns to throw, because discounting favours speed.
    """
    gentle: Array = 1.0 / (1.0 + (arm.drop / DROPPED) ** 2)
    return gentle


def released(arm: PickPlaceArm) -> Array:
    """[num_envs] bool: no finger touches the cube, and palm and links are too far to touch it."""
    untouched: Array = ~arm.touch.any(axis=1) & (arm.clearance > _CORNER)
    return untouched


def staged_potential(arm: PickPlaceArm) -> Array:
    """The staged potential [num_envs, 7]; a stage counts only after the stages before it."""
    held, placed, distance, error = arm.held, arm.placed, arm.distance, arm.error
    later = held | placed
    offset = arm.offset
    # Approach from above, so that the open fingers descend on both sides of the cube: distance
    # along a path that stays above the cube until it is over its middle.
    flat = np.sqrt(offset[:, 0] ** 2 + offset[:, 1] ** 2)
    above = np.minimum(2.0 * np.maximum(flat - 0.01, 0.0), TENT)
    approach = flat + np.abs(offset[:, 2] + above)
    # Lift, carry and lower: distance along a tent over the table.
    way = error + np.abs(arm.height - np.minimum(error, TENT))
    away = np.minimum(distance, arm.clearance)
    around = np.exp(-((distance / CUBE_HALF) ** 2))
    open_share = arm.opening / STROKE
    stages = np.empty((distance.size, len(STAGES)))
    stages[:, 0] = np.where(later, 1.0, 1.0 - np.tanh(6.0 * approach))
    stages[:, 1] = np.where(later, 1.0, 0.5 + 0.5 * np.cos(4.0 * (arm.cube_yaw - arm.hand_yaw)))
    stages[:, 2] = np.where(later, 1.0, 0.5 * around * (1.0 - open_share))
    stages[:, 3] = np.where(placed, 1.0, held * (1.0 - np.tanh(2.5 * way)))
    gently = placed * gentleness(arm)
    stages[:, 4] = gently * (0.5 + 0.5 * np.exp(-((error / 0.015) ** 2)))
    stages[:, 5] = gently * open_share
    stages[:, 6] = gently * released(arm) * np.minimum(away / CLEAR, 1.0)
    return stages


DAMPING = 0.05
"""Damping of the least squares: it limits joint steps near stretched poses."""
POSTURE = 0.2
"""Fraction of the way to the home posture per call, in the null space of the hand's pose. Without
it the elbow drifts, and the hand's pose no longer determines that of the arm."""


class HandControl:
    """Cartesian control of the hand by damped least squares; the fingers keep pointing down.

    It has no state: a displacement is relative to the current position of the hand.
    """

    def __init__(self, simulation: Simulation, table: ArmTable, home: Array) -> None:
        """home: [7] rad, the posture that the null space is controlled to."""
        site = simulation.model.site(HAND_SITE)
        self._simulation = simulation
        self._body = int(site.bodyid[0])
        self._hand = simulation.site(HAND_SITE)
        self.frame: Array = simulation.bind("site_xmat")[:, site.id].reshape(-1, 3, 3)
        """[rows, 3, 3]: axes of the hand as columns, a view; the fingers close along the second."""
        self._home = home
        self._position = simulation.bind("qpos")[:, : len(home)]
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        self._speed = table.speed
        self._diagonal = np.arange(6)

    def yaw(self) -> Array:
        """[rows] rad: yaw of the hand; 0 in the middle of its range."""
        yaw: Array = np.arctan2(-self.frame[:, 1, 0], -self.frame[:, 0, 0])
        return yaw

    def targets(self, displacement: Array, yaw: Array, seconds: float) -> Array:
        """Joint targets [rows, 7] that move the hand by [rows, 3] m and turn it to yaw [rows] rad.

        They respect the ranges of the joints, and their speed limits for a step of `seconds`.
        """
        joints = self._home.size
        translation, rotation = self._simulation.jacobians(self._body, self._hand)
        jacobian = np.concatenate([translation, rotation], axis=1)[:, :, :joints]
        error = np.concatenate([displacement, _turn(self.frame, _pointing_down(yaw))], axis=1)
        posture = (self._home - self._position) * POSTURE
        error -= (jacobian @ posture[:, :, None])[:, :, 0]
        transposed = jacobian.transpose(0, 2, 1)
        square = jacobian @ transposed
        square[:, self._diagonal, self._diagonal] += DAMPING**2
        step = posture + (transposed @ np.linalg.solve(square, error[:, :, None]))[:, :, 0]
        # Scale the whole step, so that the hand keeps its direction.
        excess = (np.abs(step) / (self._speed * seconds)).max(axis=1, keepdims=True)
        step /= np.maximum(excess, 1.0)
        target: Array = np.minimum(np.maximum(self._position + step, self._low), self._high)
        return target


def _pointing_down(yaw: Array) -> Array:
    """Frames [rows, 3, 3] whose third axis points down, with yaw [rows] rad."""
    frame = np.zeros((yaw.size, 3, 3))
    frame[:, 1, 1] = np.cos(yaw)
    frame[:, 0, 1] = -np.sin(yaw)
    frame[:, 0, 0] = -frame[:, 1, 1]
    frame[:, 1, 0] = frame[:, 0, 1]
    frame[:, 2, 2] = -1.0
    return frame


def _turn(frame: Array, wanted: Array) -> Array:
    """Rotation [rows, 3] from frames to wanted frames [rows, 3, 3]: axis times sine of the
    angle."""
    rotation = wanted @ frame.transpose(0, 2, 1)
    turn = np.stack(
        [
            rotation[:, 2, 1] - rotation[:, 1, 2],
            rotation[:, 0, 2] - rotation[:, 2, 0],
            rotation[:, 1, 0] - rotation[:, 0, 1],
        ],
        axis=1,
    )
    turn *= 0.5
    return turn


def solve_pose(model: mujoco.MjModel, start: Array, hand: Array, yaw: float) -> Array:
    """Solve for joint angles [7] with the hand at [3] m, pointing down; `start`: initial angles
    [7]."""
    data, joints = mujoco.MjData(model), len(start)
    site = model.site(HAND_SITE).id
    data.qpos[:joints] = start
    wanted = _pointing_down(np.array([yaw]))
    translation, rotation = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    for _ in range(100):
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        turn = _turn(data.site_xmat[site].reshape(1, 3, 3), wanted)[0]
        error = np.concatenate([hand - data.site_xpos[site], turn])
        mujoco.mj_jacSite(model, data, translation, rotation, site)
        jacobian = np.concatenate([translation, rotation])[:, :joints]
        square = jacobian @ jacobian.T + DAMPING**2 * np.eye(6)
        data.qpos[:joints] += jacobian.T @ np.linalg.solve(square, error)
    solution: Array = data.qpos[:joints].copy()
    return solution
