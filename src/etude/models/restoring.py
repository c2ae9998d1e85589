"""Policies from the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, SerializeAsAny

from etude.core.errors import UsageError
from etude.core.trees import Tree
from etude.core.trust import doubt
from etude.models.actor_critic import CONTRACT_FORMAT, BasePolicy, PolicyConfig
from etude.models.policies import POLICIES
from etude.models.rebuilding import Contract, rebuild


class PolicyContract(Contract):
    """What `BasePolicy.contract` gives."""

    policy: Annotated[SerializeAsAny[PolicyConfig], BeforeValidator(POLICIES.validate)]


def policy_from_contract(
    contract: Tree, arrays: Tree, path: Path = Path("contract.json"), trust: bool = False
) -> BasePolicy:
    """The policy a checkpoint's `policy/` holds.

    trust: code that it names as its kind may run, now and later for the same `path`.
    """
    if contract.get("format") != CONTRACT_FORMAT:
        raise UsageError(
            f"This policy has format {str(contract.get('format'))[:60]}; this version of etude "
            f"reads format {CONTRACT_FORMAT}."
        )

    kind = contract["policy"].get("kind") if isinstance(contract.get("policy"), dict) else None
    if isinstance(kind, str):  # A file must not choose which code runs.
        doubt([kind], path, trust)
    return rebuild(
        PolicyContract,
        contract,
        arrays,
        lambda said: said.policy.build(said.observations, said.action, None),
    )
