"""The one module that a package of your own imports: `from etude.plugin import OnPolicyConfig`.

Each name is loaded when it is first used, so a task loads no torch, and a network no MuJoCo.

Every kind
    Config, UsageError, NonFinite: the base of all configs, and errors that are one sentence.
    Key: the source of all randomness. Array, Tree: types of arrays and of state.
    Metric, Metrics, Column, Curve: metrics that a config declares, and where they are shown.

Algorithms
    OnPolicyConfig, OffPolicyConfig, AlgorithmConfig: the base of your config, most done first.
    PolicyAlgorithm, OffPolicy, Algorithm: the base of your algorithm, and the protocol it meets.
    Clock, Loops, Fragment, BatchMetrics, Broadcast: what the training loop passes to it and takes.
    Ranks, ALONE: the processes that share a run.
    Resolved, Inputs, Learner, PlanSection: what a config of `AlgorithmConfig` plans and builds.

Rollouts, advantages and replay
    SegmentGeometry, SegmentBuffer, join, check_finite, episode_starts: the rollout buffer.
    rollout_advantages, advantages_and_targets, values_after: GAE and V-trace.
    Experience, Sample, Sampler, Batch, uniform, mixture, td_targets: minibatches of a replay.

Gradient steps
    NetworkOptimizer, TargetNetwork, AdaptiveRate: Adam with checked gradients, Polyak averaging,
    and a learning rate that follows the KL divergence.

Policies and networks
    ModulePolicyConfig: a policy for PPO whose networks are your own modules.
    BasePolicyConfig, BasePolicy, ActorCritic, EvaluatedActions, Memory: policies in general.
    PolicyConfig, Mlp, make_policy, Features, map_features: the built-in ones.
    Normaliser, RewardScaler, merge_all: running statistics of observations and rewards.

Environments
    mj: tasks on MuJoCo: `mj.TaskConfig`, `mj.Task`, `mj.Part`, `mj.Draws`, terms.
    ArrayTask, State, Outcome: tasks in numpy.
    EnvConfig, BatchEnv, EnvSpec, StepResult, Exactness, Described: environments in general.
    ActionSpec, ArraySpec, Observations, Streams: spaces, observations, random generators.

Reward sources
    RewardsConfig, RewardSource: the base of your config and of your source.
    RewardsSection: what a config adds to a plan. GIVEN: the environment's own rewards.

Dataset formats
    DatasetFormat, DatasetReader: the base of your format and of what reads its files.
    FileEpisode, LazyArray, DataError: an episode as a file has it, and what is wrong with a file.
    ExportedDataset, Episode: what a format writes.

Logs and callbacks
    LogConfig, LoggedRun, OpenLog, LogWriter, Background, history_of: log writers.
    Callback, Context, StopAtSuccess, CurveRecorder: hooks of the training loop.

Recipes
    Recipe: all settings of a run.
    ClockConfig, CollectorConfig, LearnerConfig, EvaluationConfig, CheckpointConfig,
    CurriculumConfig, LogsConfig: sections of it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any


def _places() -> dict[str, str]:
    """{name: module} of everything that the stub beside this file imports."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


_PLACES = _places()
__all__ = sorted(_PLACES)


def __getattr__(name: str) -> Any:
    """Load a name from its module when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"module 'etude.plugin' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value
