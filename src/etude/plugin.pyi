# The names of `etude.plugin`, by purpose. `plugin.py` loads each from here when it is first used,
# and type checkers read this file.

# Every kind
from etude.core.config import Config as Config
from etude.core.contracts import Array as Array
from etude.core.errors import NonFinite as NonFinite
from etude.core.errors import UsageError as UsageError
from etude.core.keys import Key as Key
from etude.core.metrics import Column as Column
from etude.core.metrics import Curve as Curve
from etude.core.metrics import Metric as Metric
from etude.core.metrics import Metrics as Metrics
from etude.core.trees import Tree as Tree

# isort: split
# Algorithms
from etude.core.clock import Clock as Clock
from etude.core.clock import Loops as Loops
from etude.core.contracts import Algorithm as Algorithm
from etude.core.contracts import BatchMetrics as BatchMetrics
from etude.core.contracts import Broadcast as Broadcast
from etude.core.contracts import Fragment as Fragment
from etude.core.ranks import ALONE as ALONE
from etude.core.ranks import Ranks as Ranks
from etude.planning.recipe import AlgorithmConfig as AlgorithmConfig
from etude.planning.recipe import Inputs as Inputs
from etude.planning.recipe import Learner as Learner
from etude.planning.recipe import PlanSection as PlanSection
from etude.planning.recipe import Resolved as Resolved
from etude.rl.base import PolicyAlgorithm as PolicyAlgorithm
from etude.rl.off_policy import OffPolicy as OffPolicy
from etude.rl.off_policy import OffPolicyConfig as OffPolicyConfig
from etude.rl.on_policy import OnPolicyConfig as OnPolicyConfig

# isort: split
# Rollouts, advantages and replay
from etude.data.returns import advantages_and_targets as advantages_and_targets
from etude.data.returns import rollout_advantages as rollout_advantages
from etude.data.returns import td_targets as td_targets
from etude.data.returns import values_after as values_after
from etude.data.segments import SegmentBuffer as SegmentBuffer
from etude.data.segments import SegmentGeometry as SegmentGeometry
from etude.data.segments import check_finite as check_finite
from etude.data.segments import episode_starts as episode_starts
from etude.data.segments import join as join
from etude.rl.sampling import Batch as Batch
from etude.rl.sampling import Experience as Experience
from etude.rl.sampling import Sample as Sample
from etude.rl.sampling import Sampler as Sampler
from etude.rl.sampling import mixture as mixture
from etude.rl.sampling import uniform as uniform

# isort: split
# Gradient steps
from etude.rl.base import AdaptiveRate as AdaptiveRate
from etude.rl.base import NetworkOptimizer as NetworkOptimizer
from etude.rl.base import TargetNetwork as TargetNetwork

# isort: split
# Policies and networks
from etude.models.actor_critic import ActorCritic as ActorCritic
from etude.models.actor_critic import EvaluatedActions as EvaluatedActions
from etude.models.actor_critic import Memory as Memory
from etude.models.actor_critic import ModulePolicyConfig as ModulePolicyConfig
from etude.models.networks import Mlp as Mlp
from etude.models.networks import Normaliser as Normaliser
from etude.models.networks import RewardScaler as RewardScaler
from etude.models.networks import merge_all as merge_all
from etude.models.policies import BasePolicy as BasePolicy
from etude.models.policies import BasePolicyConfig as BasePolicyConfig
from etude.models.policies import Features as Features
from etude.models.policies import PolicyConfig as PolicyConfig
from etude.models.policies import make_policy as make_policy
from etude.models.policies import map_features as map_features

# isort: split
# Environments
from etude import mj as mj
from etude.core.contracts import ActionSpec as ActionSpec
from etude.core.contracts import ArraySpec as ArraySpec
from etude.core.contracts import BatchEnv as BatchEnv
from etude.core.contracts import Described as Described
from etude.core.contracts import EnvSpec as EnvSpec
from etude.core.contracts import Exactness as Exactness
from etude.core.contracts import Observations as Observations
from etude.core.contracts import StepResult as StepResult
from etude.core.keys import Streams as Streams
from etude.envs.array_task import ArrayTask as ArrayTask
from etude.envs.array_task import Outcome as Outcome
from etude.envs.array_task import State as State
from etude.envs.config import EnvConfig as EnvConfig

# isort: split
# Reward sources
from etude.planning.recipe import RewardsConfig as RewardsConfig
from etude.planning.recipe import RewardsSection as RewardsSection
from etude.rl.rewards.given import GIVEN as GIVEN
from etude.rl.rewards.given import RewardSource as RewardSource

# isort: split
# Dataset formats
from etude.data.formats.base import DataError as DataError
from etude.data.formats.base import DatasetFormat as DatasetFormat
from etude.data.formats.base import DatasetReader as DatasetReader
from etude.data.formats.base import Episode as Episode
from etude.data.formats.base import ExportedDataset as ExportedDataset
from etude.data.formats.base import FileEpisode as FileEpisode
from etude.data.formats.base import LazyArray as LazyArray

# isort: split
# Logs and callbacks
from etude.core.contracts import LogWriter as LogWriter
from etude.core.history import history_of as history_of
from etude.training.logs.outputs import Background as Background
from etude.training.logs.outputs import LogConfig as LogConfig
from etude.training.logs.outputs import LoggedRun as LoggedRun
from etude.training.logs.outputs import OpenLog as OpenLog
from etude.training.loop import Callback as Callback
from etude.training.loop import Context as Context
from etude.training.loop import CurveRecorder as CurveRecorder
from etude.training.loop import StopAtSuccess as StopAtSuccess

# isort: split
# Recipes
from etude.core.clock import ClockConfig as ClockConfig
from etude.planning.recipe import LearnerConfig as LearnerConfig
from etude.planning.recipe import Recipe as Recipe
from etude.rollout.local import CollectorConfig as CollectorConfig
from etude.training.curriculum import CurriculumConfig as CurriculumConfig
from etude.training.evaluation import EvaluationConfig as EvaluationConfig
from etude.training.logs.outputs import LogsConfig as LogsConfig
from etude.training.saving import CheckpointConfig as CheckpointConfig
