"""Rebuild networks from an untrusted contract and arrays.

The contract is validated field by field, and compared with the shapes and types of the arrays
before memory is allocated for the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import BeforeValidator, Field, FiniteFloat, SerializeAsAny, ValidationError
from torch import nn

from etude.core.config import Config
from etude.core.contracts import ActionSpec, ArraySpec
from etude.core.errors import EtudeError, UsageError, describe_error
from etude.core.explain import explain
from etude.core.trees import Tree, is_array
from etude.core.user_code import require_trust
from etude.models.networks import MOST_UNITS, load_arrays
from etude.models.policies import CONTRACT_FORMAT, POLICIES, BasePolicy, BasePolicyConfig


class Contract(Config):
    """Fields of every network's contract: observations and actions."""

    format: int
    observations: dict[str, ArraySpec]
    action: ActionSpec


C = TypeVar("C", bound=Contract)
M = TypeVar("M", bound=nn.Module)


def rebuild(model: type[C], contract: Tree, arrays: Tree, make: Callable[[C], M]) -> M:
    """Build the network of a contract and load its arrays; raises if they do not match.

    make: builds the network without drawing weights, also on the meta device.
    """
    try:
        parsed = model.model_validate(contract)
        _check(parsed)
        with torch.device("meta"):
            described = make(parsed).state_dict()
        _compare(described, arrays)
        network = make(parsed)
        load_arrays(network, arrays)
    except EtudeError:
        raise
    except ValidationError as error:
        raise UsageError(f"The contract is not one of Etude's: {explain(error, model)}") from error
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise UsageError(
            f"No network can be built from the contract: {describe_error(error)}."
        ) from error
    return network


def _check(parsed: Contract) -> None:
    """Check shapes and bounds, which types do not cover."""
    for name, spec in parsed.observations.items():
        if not spec.shape or not all(1 <= n <= MOST_UNITS for n in spec.shape):
            raise UsageError(f"The contract gives '{name[:60]}' an impossible shape.")
        if spec.dtype[:60] not in ("float32", "float64", "uint8", "int32", "int64", "bool"):
            raise UsageError(f"The contract gives '{name[:60]}' an unknown type.")
    action = parsed.action
    if action.kind == "box":
        whole = len(action.low) == len(action.high) > 0 and not action.sizes
        sound = whole and all(map(math.isfinite, (*action.low, *action.high)))
    else:
        sound = bool(action.sizes) and all(1 <= n <= MOST_UNITS for n in action.sizes)
        sound = sound and not action.low and not action.high
        sound = sound and (len(action.sizes) == 1 or action.kind == "multi_discrete")
    if not sound:
        raise UsageError("The contract gives the action bounds or sizes that do not fit its kind.")


def _compare(described: Tree, arrays: Tree) -> None:
    """Raise for arrays of other names, shapes or types than in the contract."""
    for name in sorted(described.keys() ^ arrays.keys()):
        there = "in the contract" if name in described else "among the arrays"
        raise UsageError(f"Contract and arrays differ: '{name[:60]}' is only {there}.")
    for name, expected in described.items():
        found = arrays[name]
        if not is_array(found):
            raise UsageError(f"Contract and arrays differ: '{name}' is not an array.")
        shape, dtype = tuple(expected.shape), _dtype(expected)
        if (tuple(found.shape), _dtype(found)) != (shape, dtype):
            raise UsageError(
                f"Contract and arrays differ: '{name}' is {_dtype(found)} of shape "
                f"{tuple(found.shape)}, and not {dtype} of shape {shape}."
            )


def _dtype(array: torch.Tensor | np.ndarray) -> str:
    return str(array.dtype).removeprefix("torch.")


class PolicyContract(Contract):
    """Contract of a policy, from `BasePolicy.contract`."""

    policy: Annotated[SerializeAsAny[BasePolicyConfig], BeforeValidator(POLICIES.validate)]
    sentences: dict[str, tuple[FiniteFloat, ...]] = Field({})

    def build(self) -> BasePolicy:
        """Build the policy without drawing weights."""
        policy = self.policy.build(self.observations, self.action, None)
        size = {len(vector) for vector in self.sentences.values()}
        if size and size != {policy.vectors.get("task")}:
            raise UsageError("The contract gives sentences vectors that no observation has.")
        policy.sentences = self.sentences
        return policy


def policy_from_contract(
    contract: Tree, arrays: Tree, path: Path = Path("contract.json"), trust: bool = False
) -> BasePolicy:
    """Rebuild the policy of a checkpoint's `policy/`.

    trust: allow code that it names as its kind, now and later for the same `path`.
    """
    if contract.get("format") != CONTRACT_FORMAT:
        raise UsageError(
            f"This policy has format {str(contract.get('format'))[:60]}; this version of etude "
            f"reads format {CONTRACT_FORMAT}."
        )
    kind = contract["policy"].get("kind") if isinstance(contract.get("policy"), dict) else None
    if isinstance(kind, str):  # A file must not select the code that runs.
        require_trust([kind], path, trust)
    return rebuild(PolicyContract, contract, arrays, PolicyContract.build)
