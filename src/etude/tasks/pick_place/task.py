"""Pick and place: a KUKA iiwa 14 grasps a cube by friction, carries it and puts it down.

The policy's outputs go straight to the controller. Success is earned by physics alone: the cube
must have been off the table between two pressing fingers, and lie at rest in the target, let go
of, with fingers, palm and links away from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from etude.core.config import Config
from etude.core.contracts import ActionSpec, Array, Observations
from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.envs.mujoco.batch import Camera, MujocoConfig, MujocoTask, Simulation
from etude.robots.kuka.clearance import Clearance
from etude.robots.kuka.hand_control import HandControl, solve_pose
from etude.robots.kuka.scene import FINGERS, HAND_SITE, STROKE, ArmTable, arm_table
from etude.tasks.pick_place.randomisation import (
    Disturbance,
    ModelRandomiser,
    PickPlaceRandom,
)
from etude.tasks.pick_place.scene import (
    CONTROL_SECONDS,
    CUBE,
    REST_HEIGHT,
    TABLE_CENTER,
    Cone,
    Integrator,
    scene,
)
from etude.tasks.pick_place.terms import (
    CLEAR,
    LOW,
    STAGES,
    PickPlaceView,
    free,
    pick_place_terms,
    rate,
)

GUESS = (0.0, 0.5, 0.0, -1.5, 0.0, 1.2, 0.0)
"""Joint angles the home posture is solved from, rad: elbow up, hand down."""
START_HEIGHT = 0.18
"""Of the hand above the table at the start, m."""
FINGER_STEP = 0.01
"""How far ahead of themselves the fingers are sent, m: 10 N each when the cube blocks them, and
no faster than 0.25 m/s."""
_PRESS = 0.5
"""Force of a finger that counts as holding, N: half the cube's weight."""
_TOUCH = 0.01
"""Force that counts as touching, N."""
_NEAR = 0.035
"""Between the fingers: hand to cube, m."""
_LIFTED = 0.02
"""Above the table, m."""
_SLOW = 0.05
"""At rest: m/s and rad/s."""
_REST_STEPS = 2
"""Consecutive control steps a cube must lie still."""


class PickPlaceReward(Config):
    """Weights of the reward terms.

    A stage pays each new height once, when it is first reached in an episode; and as a potential
    phi it pays gamma phi(s') - phi(s) (potential-based shaping), which says at once what a step
    gained or lost and does not change which policy is best. So lingering earns nothing.
    """

    reach: float = Field(1.0, description="For bringing the fingers around the cube, from above.")
    align: float = Field(0.0, description="For turning the hand along the cube.")
    grasp: float = Field(1.0, description="For closing them on it.")
    carry: float = Field(4.0, description="For carrying it over the table to the target.")
    place: float = Field(1.0, description="For setting it down gently near the target's middle.")
    release: float = Field(1.0, description="For opening the fingers there.")
    clear: float = Field(4.0, description="For taking the hand away.")
    action_cost: float = Field(-0.01, description="Per unit of mean squared action.")
    success: float = Field(
        8.0, description="Once, when the cube rests there alone; half if let go of 2 cm above."
    )
    fallen: float = Field(-2.0, description="Once, when the cube leaves the table.")


class PickPlaceConfig(MujocoConfig):
    """Pick up a cube by friction and put it down at a target."""

    demonstration: ClassVar[str] = "etude.tasks.pick_place.demonstration:DemonstratedPickPlace"

    kind: Literal["pick-place"] = "pick-place"
    cube_center: tuple[float, float] = Field(
        (0.0, -0.12), description="Middle of the area cubes start in, m from the table's."
    )
    cube_area: tuple[float, float] = Field((0.02, 0.02), description="Sides of it, m.")
    cube_turn: float = Field(0.2, ge=0, description="Largest turn of the cube at the start, rad.")
    target_center: tuple[float, float] = Field(
        (0.0, 0.12), description="Middle of the area targets lie in, m from the table's."
    )
    target_area: tuple[float, float] = Field((0.02, 0.02), description="Sides of it, m.")
    min_distance: float = Field(0.06, ge=0.05, description="From cube to target at least, m.")
    start_jitter: float = Field(0.02, ge=0, description="Of each joint at the start, rad.")
    radius: float = Field(0.03, gt=0, le=0.03, description="How close to the target counts, m.")
    control: Literal["hand", "hand-turn", "joint"] = Field(
        "hand", description="Actions move the hand, move and turn it, or move the joints."
    )
    reach_step: float = Field(
        0.05, gt=0, description="How far ahead of itself a unit action sends the hand, m."
    )
    turn_step: float = Field(0.4, gt=0, description="Likewise for its turn, rad.")
    joint_speed: float = Field(0.5, gt=0, le=1, description="Joint control: share of the limit.")
    substeps: int = Field(8, ge=4, description="Physics steps per control step of 0.1 s.")
    cone: Cone = Field("pyramidal", description="Friction cones of the physics.")
    integrator: Integrator = Field("discrete", description="implicitfast needs 200 substeps.")
    max_episode_steps: int = Field(200, ge=1, le=200, description="Control steps at most.")
    reward: PickPlaceReward = Field(PickPlaceReward(), description="Weights of the terms.")
    shaping: float = Field(
        0.3,
        ge=0,
        description="Weight of potential-based shaping, gamma phi(s') - phi(s), relative to the "
        "stages' weights; 0 is none.",
    )
    discount: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Discount of the shaping; must equal algorithm.gamma. A sum of rewards "
        "(env.episodic) is not shaped.",
    )
    random: PickPlaceRandom = Field(
        PickPlaceRandom(), description="How much physics and senses differ between episodes."
    )

    def shaping_discount(self) -> float | None:
        return None if self.episodic or not self.shaping else self.discount

    @classmethod
    def anywhere(cls, **changes: Any) -> Self:
        """Cube anywhere in 30 x 40 cm with any yaw, target anywhere else in it."""
        area = {"cube_center": (0.0, 0.0), "cube_area": (0.3, 0.4), "cube_turn": 3.1416}
        area |= {"target_center": (0.0, 0.0), "target_area": (0.3, 0.4)}
        values = {**area, "control": "hand-turn", "reward": {"align": 0.5}, **changes}
        return cls.model_validate(values)

    def build(self, num_envs: int, threads: int = 1) -> PickPlace:
        return PickPlace(self, num_envs, threads)


class PickPlace(MujocoTask[PickPlaceView]):
    """Actions: [rows, n] in [-1, 1]; the last is the gripper, open where positive.

    "hand": displacement of the hand in x, y, z; it keeps pointing straight down, turned to 0.
    "hand-turn": also its turn about the vertical. "joint": the seven joints.
    All are relative to where the hand or the joints are.
    """

    def __init__(self, config: PickPlaceConfig, num_envs: int, threads: int = 1) -> None:
        model = scene(CONTROL_SECONDS / config.substeps, config.cone, config.integrator)
        table = arm_table()
        simulation = Simulation(model, num_envs, threads)
        start = TABLE_CENTER + np.array([0.0, 0.0, START_HEIGHT])
        self._config = config
        self._home = solve_pose(model, np.array(GUESS), start, 0.0)
        self._hand_control = HandControl(simulation, table, self._home)
        # A sum has no discount for which shaping would cancel: it would pay to run out of time.
        self._shaping = config.shaping if config.shaping_discount() is not None else 0.0
        self._speed = table.speed * (config.joint_speed * CONTROL_SECONDS)
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        self._clearance = Clearance(simulation)
        self._bind(simulation, table)
        self._last_hand = np.zeros((num_envs, 3))
        self._model = ModelRandomiser(config.random, simulation)
        self._disturbance: Disturbance | None = None
        self._level = 1.0
        self.shot = Camera(
            look_at=(0.5, 0.0, 0.22),
            distance=1.1,
            azimuth=145.0,
            elevation=-30.0,
            floor=0.0,
            target="disc",
            target_radius=config.radius,
            target_sink=REST_HEIGHT - float(TABLE_CENTER[2]),
        )
        moves = {"hand": 3, "hand-turn": 4, "joint": len(table.names)}[config.control]
        super().__init__(
            simulation,
            self._make_view(simulation, moves + 1),
            pick_place_terms(joints=config.control == "joint"),
            weights=config.reward.model_dump(),
            action=ActionSpec("box", low=(-1.0,) * (moves + 1), high=(1.0,) * (moves + 1)),
            substeps=config.substeps,
            max_episode_steps=config.max_episode_steps,
        )
        if config.random.disturbs:
            width = self.spec.observations["state"].shape[0]
            self._disturbance = Disturbance(config.random, num_envs, width)

    def follow(self, curriculum: Tree) -> None:
        """Start cubes and targets in a part of their areas, and cubes less turned."""
        self._level = float(curriculum.get("level", 1.0))
        config = self._config
        sides = np.add(config.cube_area, config.target_area) / 2 * self._level
        widest = np.abs(np.subtract(config.cube_center, config.target_center)) + sides
        if float(np.linalg.norm(widest)) < 1.2 * config.min_distance:
            raise UsageError(
                f"At level {self._level:g} cube and target have no room to be "
                f"{config.min_distance:g} m apart: raise curriculum.start."
            )

    def _bind(self, simulation: Simulation, table: ArmTable) -> None:
        joints, rows = len(table.names), simulation.num_envs
        cube = joints + len(FINGERS)
        qpos, control = simulation.bind("qpos"), simulation.bind("ctrl")
        self._joints, self._fingers = qpos[:, :joints], qpos[:, joints:cube]
        self._joint_control, self._finger_control = control[:, :joints], control[:, joints:]
        self._cube_pose = qpos[:, cube : cube + 7]
        self._cube_velocity = simulation.bind("qvel")[:, cube : cube + 6]
        body = simulation.model.body(CUBE).id
        self._cube = simulation.bind("xpos")[:, body]
        self._cube_frame = simulation.bind("xmat")[:, body].reshape(rows, 3, 3)
        self._forces = simulation.bind("sensordata").reshape(rows, len(FINGERS), 3)

    def _make_view(self, simulation: Simulation, actions: int) -> PickPlaceView:
        rows = simulation.num_envs

        def numbers(*shape: int) -> Array:
            return np.zeros((rows, *shape))

        def flags(*shape: int) -> Array:
            return np.zeros((rows, *shape), np.bool_)

        return PickPlaceView(
            joint_position=self._joints,
            hand=simulation.site(HAND_SITE),
            hand_velocity=numbers(3),
            hand_yaw=numbers(),
            cube=self._cube,
            cube_velocity=self._cube_velocity,
            cube_yaw=numbers(),
            cube_level=numbers(),
            target=numbers(3),
            opening=numbers(),
            command=np.ones(rows),
            touch=flags(2),
            offset=numbers(3),
            distance=numbers(),
            clearance=numbers(),
            height=numbers(),
            error=numbers(),
            held=flags(),
            reached=flags(),
            lifted=flags(),
            carried=flags(),
            placed=flags(),
            rested=numbers(),
            success=flags(),
            fallen=flags(),
            drop=numbers(),
            stages=numbers(len(STAGES)),
            best_stages=numbers(len(STAGES)),
            gains=numbers(len(STAGES)),
            action=numbers(actions),
        )

    def _act(self, actions: Array) -> None:
        view, config = self.view, self._config
        view.action[:] = actions
        moves = view.action[:, :-1]
        if config.control == "joint":
            target = self._joints + moves * self._speed
            np.minimum(np.maximum(target, self._low), self._high, out=self._joint_control)
        else:
            turns = config.control == "hand-turn"
            yaw = view.hand_yaw + moves[:, 3] * config.turn_step if turns else 0.0 * view.hand_yaw
            displacement = moves[:, :3] * config.reach_step
            self._joint_control[:] = self._hand_control.targets(displacement, yaw, CONTROL_SECONDS)
        np.copyto(view.command, np.where(view.action[:, -1] > 0.0, 1.0, -1.0))
        # One target for both fingers, a little ahead: they move alike and centre the cube, and
        # the distance bounds their speed and the force on it.
        ahead = self._fingers.mean(axis=1) + view.command * FINGER_STEP
        self._finger_control[:] = np.minimum(np.maximum(ahead, 0.0), STROKE / 2)[:, None]

    def _measure(self) -> None:
        view = self.view
        np.divide(view.hand - self._last_hand, CONTROL_SECONDS, out=view.hand_velocity)
        self._last_hand[:] = view.hand
        self._locate()
        self._feel()
        self._judge()
        self._pay()
        if self._disturbance is not None:
            self._disturbance.push(super()._observe()["state"])

    def _locate(self) -> None:
        """Where things are to each other."""
        view, frame = self.view, self._cube_frame
        view.hand_yaw[:] = self._hand_control.yaw()
        view.opening[:] = self._fingers.sum(axis=1)
        np.subtract(view.cube, view.hand, out=view.offset)
        np.sqrt(np.einsum("ij,ij->i", view.offset, view.offset), out=view.distance)
        view.clearance[:] = self._clearance.of(view.cube)
        np.subtract(view.cube[:, 2], REST_HEIGHT, out=view.height)
        away = view.target - view.cube
        np.sqrt(away[:, 0] ** 2 + away[:, 1] ** 2, out=view.error)
        # A cube may lie on any face: the yaw of whichever of two edges is the more horizontal.
        edge = np.where(np.abs(frame[:, 2, :1]) < 0.7, frame[:, :2, 0], frame[:, :2, 1])
        np.arctan2(edge[:, 1], edge[:, 0], out=view.cube_yaw)
        np.abs(frame[:, 2]).max(axis=1, out=view.cube_level)

    def _feel(self) -> None:
        """What the fingers touch, and whether they hold the cube, from the contact forces."""
        view = self.view
        forces = self._forces
        np.greater(np.einsum("ijk,ijk->ij", forces, forces), _TOUCH**2, out=view.touch)
        closing = np.einsum("ijk,ik->ij", forces, self._hand_control.frame[:, :, 1])
        # The left finger presses against the hand's second axis, the right one along it.
        pressed = (closing[:, 0] < -_PRESS) & (closing[:, 1] > _PRESS)
        np.logical_and(pressed, view.distance < _NEAR, out=view.held)

    def _judge(self) -> None:
        """What has happened: reached, lifted, placed, dropped, done."""
        view, height = self.view, self.view.height
        inside = view.error <= self._config.radius
        down = height < LOW
        lifted = view.held & (height > _LIFTED)
        np.logical_or(view.reached, view.distance < _NEAR, out=view.reached)
        np.logical_or(view.lifted, lifted, out=view.lifted)
        # A cube that was let go of outside must be picked up again: pushing it in earns nothing.
        left = down & ~view.held & ~inside
        np.copyto(view.carried, (view.carried | lifted) & ~left)
        np.logical_and(view.carried, inside & down, out=view.placed)
        np.copyto(view.drop, np.maximum(height, 0.0), where=view.held)
        still = np.abs(view.cube_velocity).max(axis=1) < _SLOW
        away = np.minimum(view.distance, view.clearance) > CLEAR
        rests = view.placed & free(view) & still & (height < 0.002) & away
        np.multiply(view.rested + 1.0, rests, out=view.rested)
        np.greater_equal(view.rested, _REST_STEPS, out=view.success)
        np.less(height, -0.03, out=view.fallen)

    def _pay(self) -> None:
        """What the stages are worth: new heights, once, and the gain of the potential."""
        view, before = self.view, self.view.stages.copy()
        view.stages[:] = rate(view)
        best = np.maximum(view.best_stages, view.stages)
        # Where an episode terminates nothing is left to hope for: there the potential is 0, or it
        # would be a reward of its own. Where time runs out it stays, and so does the value.
        goes_on = ~(view.success | view.fallen)
        shaping = self._config.discount * view.stages * goes_on[:, None] - before
        np.add(best - view.best_stages, self._shaping * shaping, out=view.gains)
        view.best_stages[:] = best

    def _place(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        config, count = self._config, self._home.size
        draws = np.array([generator.random(count + 1) for generator in generators]) * 2.0 - 1.0
        joints = self._home + draws[:, :count] * config.start_jitter
        half_turn = draws[:, count] * (config.cube_turn * self._level / 2)
        points = np.array([self._draw_points(generator) for generator in generators])
        self._joints[rows] = joints
        self._joint_control[rows] = joints
        self._fingers[rows] = STROKE / 2
        self._finger_control[rows] = STROKE / 2
        pose = np.zeros((rows.size, 7))
        pose[:, :2], pose[:, 2] = points[:, 0], REST_HEIGHT
        pose[:, 3], pose[:, 6] = np.cos(half_turn), np.sin(half_turn)
        self._cube_pose[rows] = pose
        self.view.target[rows, :2] = points[:, 1]
        self.view.target[rows, 2] = REST_HEIGHT
        # After the start, so that the starts are the same with and without randomisation.
        self._model.draw(rows, generators)
        if self._disturbance is not None:
            self._disturbance.draw(rows, generators)

    def _draw_points(self, generator: np.random.Generator) -> Array:
        """Cube and target, [2, 2] m, drawn until they are apart."""
        config = self._config
        center = np.array([config.cube_center, config.target_center]) + TABLE_CENTER[:2]
        area = np.array([config.cube_area, config.target_area]) * self._level
        while True:
            points: Array = center + (generator.random((2, 2)) - 0.5) * area
            if float(np.linalg.norm(points[0] - points[1])) >= config.min_distance:
                return points

    def _aim(self, rows: Array, generators: Sequence[np.random.Generator]) -> None:
        view = self.view
        history = (view.touch, view.held, view.reached, view.lifted, view.carried, view.placed)
        for flag in (*history, view.success, view.fallen):
            flag[rows] = False
        for number in (view.rested, view.drop, view.action, view.hand_velocity):
            number[rows] = 0.0
        view.command[rows] = 1.0
        self._last_hand[rows] = view.hand[rows]
        self._locate()
        view.stages[rows] = view.best_stages[rows] = rate(view)[rows]
        if self._disturbance is not None:
            self._disturbance.begin(rows, super()._observe()["state"][rows])

    def _observe(self) -> Observations:
        if self._disturbance is None:
            return super()._observe()
        return super()._observe() | {"state": self._disturbance.observe(self._elapsed)}

    def _memory(self) -> dict[str, Array]:
        # What the next step reads before it writes; the rest of the view follows from these.
        # Contact forces are an acceleration, which a restored state does not have yet.
        view = self.view
        disturbance = {} if self._disturbance is None else self._disturbance.memory()
        return {
            **disturbance,
            "target": view.target,
            "hand": self._last_hand,
            "hand_yaw": view.hand_yaw,
            "reached": view.reached,
            "lifted": view.lifted,
            "carried": view.carried,
            "rested": view.rested,
            "drop": view.drop,
            "stages": view.stages,
            "best_stages": view.best_stages,
        }
