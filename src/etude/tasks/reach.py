"""Reach: hold the hand of a KUKA iiwa 14 at a random point, by joint control; and its recipes."""

from __future__ import annotations

from functools import wraps
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from etude.core.clock import ClockConfig
from etude.core.config import Config
from etude.core.contracts import Array, Observations
from etude.core.trees import Tree
from etude.envs.mujoco.config import TaskConfig
from etude.envs.mujoco.simulation import Camera
from etude.envs.mujoco.task import Action, Demonstration, Draws, Task, Term, measured
from etude.envs.robots.kuka import HAND_SITE, arm_table, joint_names, kuka_spec
from etude.models.policies import PolicyConfig
from etude.planning.recipe import LearnerConfig, Recipe
from etude.rl.ppo import PPOConfig
from etude.rollout.local import CollectorConfig
from etude.training.evaluation import EvaluationConfig
from etude.training.saving import CheckpointConfig

TIMESTEP = 0.01
_DAMPING = 0.05
"""Damping of the expert's least squares."""
HOME = (0.0, 0.38, 0.0, -1.28, 0.0, 1.48, 0.0)
"""Initial joint angles, rad: the hand points down, in the middle of the box."""
BOX_CENTER = (0.55, 0.0, 0.45)
"""The middle of the box of targets, m."""
_SHARPNESS = -50.0
"""Exponent of the precision term, 1/m: its length scale is 2 cm, the default tolerance."""
CAMERA = Camera(look_at=(0.3, 0.0, 0.45), distance=1.5, azimuth=125.0, elevation=-20.0, floor=0.0)


class ReachReward(Config):
    """Weights of the reward terms."""

    progress: float = Field(10.0, description="Metres that the hand came closer to the target.")
    precision: float = Field(2.0, description="Change of exp(-distance / 2 cm).")
    hold: float = Field(1.0, description="Change of the held fraction of the holding time.")
    action_cost: float = Field(-0.01, description="Mean squared action.")
    success: float = Field(5.0, description="Once, when the target was held.")


class ReachingArm(Action):
    """Arm and target. Actions: [num_envs, 7] in [-1, 1], joint targets relative to the current
    joint positions.

    An action of 1 commands the configured fraction of the joint's speed limit: the servo moves to a
    target at distance `step` with up to step * stiffness / damping = step / 0.1 s, and a control
    step lasts 0.1 s.

    With `shown_steps` the task needs memory: while the target is observed, actions have no effect
    and no cost, and the target cannot be held, so that pose and velocity cannot encode the target.
    """

    def __init__(self, config: ReachConfig) -> None:
        super().__init__()
        self.config = config

    def bind(self) -> None:
        env, table, config = self.env, arm_table(), self.config
        self.size, num_envs = len(table.names), env.num_envs
        self._control = env.simulation.bind("ctrl")
        self._low, self._high = table.range[:, 0].copy(), table.range[:, 1].copy()
        self._scale = table.speed * (config.speed * TIMESTEP * config.substeps)
        self._home = np.array(HOME)
        self._corner = np.array(BOX_CENTER) - config.box_side / 2
        self.hold_steps = config.hold_steps
        self.joint_position: Array = env.simulation.bind("qpos")
        """[num_envs, 7] rad: joint positions."""
        self.joint_velocity: Array = env.simulation.bind("qvel")
        """[num_envs, 7] rad/s: joint velocities."""
        self.hand: Array = env.simulation.site(HAND_SITE)
        """[num_envs, 3] m: position of the hand."""
        self.action: Array = np.zeros((num_envs, self.size))
        """[num_envs, 7] in [-1, 1]: the last action that took effect."""
        self.target = env.state("target", 3)
        """[num_envs, 3] m: position of the target."""
        self.offset: Array = np.zeros((num_envs, 3))
        """[num_envs, 3] m: position of the target from the hand."""
        # The rewards are the changes of three potentials, in one array.
        self._potentials: Array = np.zeros((3, num_envs))
        names = ("distance", "closeness", "held")
        self.distance, self.closeness, self.held = map(env.keep, names, self._potentials)
        """[num_envs]: distance from hand to target, m; exp(-distance / 2 cm); consecutive control
        steps within the tolerance."""
        self._changes: Array = np.zeros((3, num_envs))
        self.distance_change, self.closeness_change, self.held_change = self._changes
        """[num_envs]: changes of these over the last control step."""
        self.shown: Array = np.ones((num_envs, 1), np.bool_)
        """[num_envs, 1] bool: whether the observation has the target."""

    def describe(self) -> Tree:
        names = joint_names(arm_table())
        wait = self.config.shown_steps or 0
        return {
            "default_pose": dict(zip(names, HOME, strict=True)),
            "action": {
                "kind": "joint_steps",
                "about": "position targets of the joints: where each joint is + scale x action, "
                "kept in the joints' ranges; in the first still_steps of an episode, where it is",
                "joints": list(names),
                "scale": self._scale.tolist(),
                "still_steps": wait,
            },
            "task": {"hold_steps": self.hold_steps, "tolerance": self.config.tolerance},
        }

    def apply(self, actions: Array) -> None:
        self.action[:] = actions
        if self.config.shown_steps is not None:
            # Multiplied, not overwritten, so that a NaN is still detected.
            free = self.env.elapsed >= self.config.shown_steps
            np.multiply(self.action, free[:, None], out=self.action)
        target = self.joint_position + self.action * self._scale
        np.maximum(target, self._low, out=target)
        np.minimum(target, self._high, out=self._control)

    def update(self) -> None:
        elapsed = self.env.elapsed
        np.negative(self._potentials, out=self._changes)
        np.subtract(self.target, self.hand, out=self.offset)
        _norm(self.offset, out=self.distance)
        np.exp(np.multiply(self.distance, _SHARPNESS, out=self.closeness), out=self.closeness)
        np.add(self.held, 1.0, out=self.held)
        np.multiply(self.held, self.distance <= self.config.tolerance, out=self.held)
        if self.config.shown_steps is not None:
            # The target can be held in steps after the shown ones.
            np.multiply(self.held, elapsed > self.config.shown_steps, out=self.held)
            np.less(elapsed, self.config.shown_steps, out=self.shown[:, 0])
        np.add(self._changes, self._potentials, out=self._changes)

    def reset(self, env_ids: Array, draws: Draws) -> None:
        jitter = np.array([generator.random(self.size) for generator in draws.generators])
        start = self._home + (jitter * 2.0 - 1.0) * self.config.start_jitter
        self.joint_position[env_ids] = start
        self._control[env_ids] = start

    def begin(self, env_ids: Array, draws: Draws) -> None:
        hand, side = self.hand[env_ids], self.config.box_side
        points = np.array([generator.random(3) for generator in draws.generators])
        offset = points * side + self._corner - hand
        away = _norm(offset)
        while (near := away < self.config.min_distance).any():
            for index in np.flatnonzero(near).tolist():
                point = draws.generators[index].random(3)
                offset[index] = point * side + self._corner - hand[index]
            away = _norm(offset)
        self.target[env_ids] = hand + offset
        self.offset[env_ids] = offset
        self.distance[env_ids] = away
        self.closeness[env_ids] = np.exp(away * _SHARPNESS)
        self.held[env_ids] = 0.0
        self.shown[env_ids] = True


def _norm(vectors: Array, out: Array | None = None) -> Array:
    """Norm [num_envs] of vectors [num_envs, n]."""
    length: Array = np.sqrt(np.einsum("ij,ij->i", vectors, vectors), out=out)
    return length


@measured("rad")
def joint_position(arm: ReachingArm) -> Array:
    """[num_envs, 7] rad: joint positions."""
    return arm.joint_position


@measured("rad/s")
def joint_velocity(arm: ReachingArm) -> Array:
    """[num_envs, 7] rad/s: joint velocities."""
    return arm.joint_velocity


@measured("m")
def hand_position(arm: ReachingArm) -> Array:
    """[num_envs, 3] m: the point between the fingertips, in the frame of the base."""
    return arm.hand


@measured("m")
def target_position(arm: ReachingArm) -> Array:
    """[num_envs, 3] m: position of the target in the frame of the base."""
    return arm.target


@measured("m")
def target_offset(arm: ReachingArm) -> Array:
    """[num_envs, 3] m: position of the target from the hand."""
    return arm.offset


@measured("m")
def target_distance(arm: ReachingArm) -> Array:
    """[num_envs, 1] m: distance from hand to target."""
    return arm.distance[:, None]


@measured("1")
def hold_share(arm: ReachingArm) -> Array:
    """[num_envs, 1]: held fraction of the holding time, 0 to 1."""
    return arm.held[:, None] / arm.hold_steps


def progress(arm: ReachingArm) -> Array:
    """Decrease of the distance to the target, m; it sums to the distance covered in an episode."""
    found: Array = -arm.distance_change
    return found


def precision(arm: ReachingArm) -> Array:
    """Increase of closeness, which has a gradient where progress is down to millimetres."""
    found: Array = arm.closeness_change
    return found


def hold(arm: ReachingArm) -> Array:
    """Change of the held fraction; leaving the tolerance costs what was gained."""
    found: Array = arm.held_change / arm.hold_steps
    return found


def action_cost(arm: ReachingArm) -> Array:
    cost: Array = np.einsum("ij,ij->i", arm.action, arm.action) / arm.action.shape[1]
    return cost


def success(arm: ReachingArm) -> Array:
    return arm.held >= arm.hold_steps


def distance(arm: ReachingArm) -> Array:
    return arm.distance


OBSERVATIONS: dict[str, Term] = {
    "joint_position": joint_position,
    "joint_velocity": joint_velocity,
    "hand_position": hand_position,
    "target_position": target_position,
    "target_offset": target_offset,
    "target_distance": target_distance,
    "hold_share": hold_share,
}
"""Terms of the observation "state", in this order."""
_OF_TARGET = ("target_position", "target_offset", "target_distance", "hold_share")
"""Terms that depend on the target, `hold_share` included: it would guide a search."""
REWARDS: dict[str, Term] = {
    "progress": progress,
    "precision": precision,
    "hold": hold,
    "action_cost": action_cost,
    "success": success,
}


def while_shown(term: Term) -> Term:
    """The term while the target is shown, 0 afterwards."""

    @wraps(term)
    def shown(arm: ReachingArm) -> Array:
        # A product would keep the sign of a zero.
        return np.where(arm.shown, term(arm), 0.0)

    return shown


class ReachDemonstration(Demonstration):
    """Progress is the covered fraction of the initial distance to the target."""

    def bind(self) -> None:
        self._first_distance = self.env.keep("first_distance", np.ones(self.env.num_envs))

    def begin(self, env_ids: Array, draws: Draws) -> None:
        self._first_distance[env_ids] = self.view.distance[env_ids]

    def progress(self) -> Array:
        covered = 1.0 - self.view.distance / self._first_distance
        return np.where(success(self.view), 1.0, covered)

    def proprioception(self) -> tuple[Array, ...]:
        return self.view.joint_position, self.view.joint_velocity, self.view.hand

    def expert(self) -> ReachExpert:
        return ReachExpert(self.view, self.config)


class ReachExpert:
    """Moves the hand straight at the target, by damped least squares on the joints."""

    def __init__(self, arm: ReachingArm, config: ReachConfig) -> None:
        self._arm, self._simulation = arm, arm.env.simulation
        self._body = int(self._simulation.model.site(HAND_SITE).bodyid[0])
        self._scale = arm_table().speed * (config.speed * (TIMESTEP * config.substeps))

    def reset(self, env_ids: Array) -> None:
        """The expert has no state."""

    def act(self, obs: Observations) -> Array:
        """Actions [num_envs, 7] float32 for the current state of the arms."""
        move, _ = self._simulation.jacobians(self._body, self._arm.hand)
        move = move[:, :, : len(self._scale)]
        square = move @ move.transpose(0, 2, 1) + _DAMPING**2 * np.eye(3)
        joints = move.transpose(0, 2, 1) @ np.linalg.solve(square, self._arm.offset[:, :, None])
        actions = joints[:, :, 0] / self._scale
        # Scale the whole action, so that the hand keeps its direction.
        actions /= np.maximum(np.abs(actions).max(axis=1, keepdims=True), 1.0)
        return np.asarray(actions, np.float32)


class ReachConfig(TaskConfig):
    """Hold the hand near a random point; actions are joint motions, without inverse kinematics."""

    demonstration: ClassVar[type[Demonstration] | None] = ReachDemonstration

    kind: Literal["reach"] = "reach"
    box_side: float = Field(0.4, gt=0, le=0.5, description="Side of the box of targets, m.")
    tolerance: float = Field(0.02, gt=0, description="Largest distance that counts as held, m.")
    hold_steps: int = Field(5, ge=1, description="Consecutive control steps to hold the target.")
    min_distance: float = Field(
        0.05, gt=0, description="Minimum initial distance from hand to target, m."
    )
    start_jitter: float = Field(
        0.1, ge=0, le=0.3, description="Largest random offset of each joint at the start, rad."
    )
    speed: float = Field(
        0.4, gt=0, le=1, description="Largest joint speed, as a fraction of the limit."
    )
    substeps: int = Field(10, ge=1, le=1000, description="Physics steps of 10 ms per control step.")
    max_episode_steps: int = Field(
        50, ge=1, description="Control steps until an episode is truncated."
    )
    shown_steps: int | None = Field(
        None,
        ge=1,
        description="Initial steps in which the target is observed and the arm held still; "
        "None: the target is always observed.",
    )
    reward: ReachReward = Field(ReachReward(), description="Weights of the reward terms.")

    @model_validator(mode="after")
    def _leaves_time_to_move(self) -> ReachConfig:
        if self.shown_steps is not None and self.shown_steps >= self.max_episode_steps:
            raise ValueError(
                f"env.shown_steps {self.shown_steps} must be less than env.max_episode_steps "
                f"{self.max_episode_steps}: the arm is held still in them"
            )
        return self

    @model_validator(mode="after")
    def _leaves_room_for_targets(self) -> ReachConfig:
        most = (
            0.7 * self.box_side
        )  # a ball of this radius around any hand leaves corners of the box
        if self.min_distance > most:
            raise ValueError(
                f"env.min_distance {self.min_distance:g} leaves no room for targets in a box of "
                f"env.box_side {self.box_side:g}: use {most:g} or less"
            )
        return self

    def define(self) -> Task:
        arm = ReachingArm(self)
        weights = self.reward.model_dump()
        observations: dict[str, dict[str, Term]] = {"state": OBSERVATIONS}
        if self.shown_steps is not None:
            # The value function, which does not act, always observes the target.
            critic = {name: OBSERVATIONS[name] for name in _OF_TARGET}
            shown = {
                name: while_shown(term) if name in _OF_TARGET else term
                for name, term in OBSERVATIONS.items()
            }
            observations = {"state": shown, "critic": critic}
        return Task(
            model=kuka_spec(fingers="locked", timestep=TIMESTEP),
            action=arm,
            view=arm,
            observations=observations,
            rewards={name: (term, weights[name]) for name, term in REWARDS.items()},
            terminations={"success": success},
            success=success,
            statistics={"final_distance": distance},
            substeps=self.substeps,
            max_episode_steps=self.max_episode_steps,
            camera=CAMERA,
        )


def reach() -> Recipe:
    """A Kuka arm learns to hold its hand at a random point, by joint control."""
    return Recipe(
        name="reach",
        env=ReachConfig(),
        policy=PolicyConfig(init_std=0.3),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=512,
            update_epochs=8,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=131_072, cycles=4, iterations=2),
        evaluation=EvaluationConfig(every="1 epoch", episodes=200, num_envs=200, envs_per_group=50),
    )


def reach_short() -> Recipe:
    """Reach in a few seconds, with frequent saves and evaluations: a run to kill and resume."""
    return Recipe(
        name="reach-short",
        env=ReachConfig(),
        policy=PolicyConfig(init_std=0.3),
        collector=CollectorConfig(num_envs=64, envs_per_group=16, threads=2),
        algorithm=PPOConfig(
            rollout_steps=16,
            minibatch_size=256,
            update_epochs=4,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=24_576, cycles=1, iterations=2),
        evaluation=EvaluationConfig(every="3 cycles", episodes=32, num_envs=32, envs_per_group=16),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def reach_memory() -> Recipe:
    """Reach with the target observed in the first 5 steps only, by an LSTM policy."""
    return Recipe(
        name="reach-memory",
        env=ReachConfig(shown_steps=5),
        policy=PolicyConfig(
            kind="lstm", hidden=(64,), units=64, init_std=0.3, critic_reads=("state", "critic")
        ),
        collector=CollectorConfig(num_envs=256, envs_per_group=128, threads=2, engine_threads=2),
        algorithm=PPOConfig(
            rollout_steps=64,
            horizon=64,
            minibatch_size=4096,
            update_epochs=4,
            learning_rate=1e-3,
            final_learning_rate=0.2,
            gamma=0.95,
            bound_coef=0.1,
        ),
        clock=ClockConfig(total_timesteps=4_194_304, cycles=8, iterations=4),
        evaluation=EvaluationConfig(every="1 epoch", episodes=200, num_envs=200, envs_per_group=50),
    )


def reach_at_scale() -> Recipe:
    """Reach with half a million steps per buffer, 10^10 in all: LSTM, priorities, lag 1."""
    return Recipe(
        name="reach-at-scale",
        env=ReachConfig(),
        policy=PolicyConfig(kind="lstm", units=128, init_std=0.3),
        collector=CollectorConfig(num_envs=8192, envs_per_group=512, threads=2, lag=1),
        algorithm=PPOConfig(
            rollout_steps=64,
            horizon=64,
            minibatch_size=16_384,
            update_epochs=1,
            sampling="prioritised",
            learning_rate=4.57e-4,
            gamma=0.977,
            gae_lambda=0.916,
            advantages="vtrace",
            clip=0.1,
            value_clip=0.1,
            value_coef=0.44,
            entropy_coef=0.0021,
            bound_coef=0.1,
            max_grad_norm=0.5,
        ),
        learner=LearnerConfig(shards=2),
        clock=ClockConfig(total_timesteps=10_000_000_000, cycles=10, iterations=10),
        evaluation=EvaluationConfig(
            every="1 epoch", episodes=512, num_envs=512, envs_per_group=256
        ),
        checkpoint=CheckpointConfig(every="1 cycle"),
    )


def episodic() -> Recipe:
    """Reach with a reward only at the end of an episode: RRD learns a reward per step."""
    from etude.rl.rewards.rrd import RRDConfig
    from etude.rl.sac import SACConfig

    return Recipe(
        name="episodic",
        env=ReachConfig(episodic=True),
        collector=CollectorConfig(num_envs=32, envs_per_group=16, threads=2),
        policy=PolicyConfig(kind="squashed", hidden=(256, 256), activation="relu"),
        algorithm=SACConfig(
            rollout_steps=10,
            train_batches=100,
            warmup_steps=4_800,
            gamma=0.95,
            capacity=200_000,
            initial_alpha=0.02,
        ),
        # Episodes are short relative to K, and some end early: the biased loss then makes rewards
        # of an episode equal, which hides the good steps.
        rewards=RRDConfig.vector().replace(loss="unbiased"),
        clock=ClockConfig(total_timesteps=57_600, cycles=5, iterations=10),
        evaluation=EvaluationConfig(every="1 epoch", episodes=100, num_envs=100, envs_per_group=50),
    )


def episodic_ircr() -> Recipe:
    """Baseline of `episodic`: every step is rewarded with its episode's return (IRCR).

    Replay capacity, batch size and target averaging are those of the method's reference
    implementation.
    """
    from etude.rl.rewards.ircr import IRCRConfig

    return episodic().replace(
        name="episodic-ircr",
        algorithm__capacity=300_000,
        algorithm__batch_size=512,
        algorithm__polyak=0.999,
        rewards=IRCRConfig(),
    )
