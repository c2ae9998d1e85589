"""`etude check`: does an environment keep the contract everything else relies on."""

from __future__ import annotations

import re
from dataclasses import asdict

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.envs.check import check_env, render_findings
from etude.envs.config import ENVS, EnvConfig


class CheckCommand(Reporting):
    """Check that an environment keeps the contract that training relies on."""

    task: Positional[str] = Field(
        description="module:Class or file.py:Class of a batched task, or a Gymnasium id."
    )
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Arguments of the environment: names and values in turn."
    )
    steps: int = Field(200, ge=1, description="Steps to take; an episode should end within them.")


def run(arguments: list[str]) -> int:
    """Print what was found; 1 if the contract is broken."""
    command = parse("check", CheckCommand, arguments)
    config = env_config(command.task, command.options)
    agents = config.num_agents
    config.build_unchecked(agents).close()  # a name that stands for nothing is no finding
    findings = check_env(config.build_unchecked, command.steps, agents=agents)
    shown = render_findings(command.task, findings)
    command.show([asdict(finding) for finding in findings], shown)
    return int(any(finding.verdict == "failed" for finding in findings))


def env_config(target: str, options: dict[str, bool | int | float | str]) -> EnvConfig:
    """What a person means by a kind, a Gymnasium id, a PettingZoo module, or a task's class."""
    if target in ENVS.names():
        return ENVS.load(target).model_validate({"kind": target, **options})
    # Gymnasium's own way to name a package, package:Env-v0, has a colon as well.
    if ":" in target and not re.search(r"-v\d+$", target):
        return ENVS.validate({"kind": "task", "task": target, "options": options})
    if re.fullmatch(r"\w+(\.\w+)*\.\w+_v\d+", target):
        return ENVS.validate({"kind": "pettingzoo", "parallel": target, "kwargs": options})
    return ENVS.validate({"kind": "gym", "id": target, "kwargs": options})
