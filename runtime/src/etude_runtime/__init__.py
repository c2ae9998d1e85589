"""Runs policies that `etude export` wrote: numpy and onnxruntime, no torch."""

from etude_runtime.contract import ContractError, Observation, Term
from etude_runtime.joints import JointTargets, Motion, Trot
from etude_runtime.policy import Policy
from etude_runtime.rate import FixedRate, Timing

__all__ = [
    "ContractError",
    "FixedRate",
    "JointTargets",
    "Motion",
    "Observation",
    "Policy",
    "Term",
    "Timing",
    "Trot",
]
