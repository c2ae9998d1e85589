"""`etude check`: does an environment keep the contract everything else relies on."""

from __future__ import annotations

import re
from dataclasses import asdict

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.core.user_code import load_object
from etude.envs.check import check_env, render_findings
from etude.envs.config import ENVS, EnvConfig


class CheckCommand(Reporting):
    """Check that an environment keeps the contract that training relies on."""

    task: Positional[str] = Field(
        description="module:Class or file.py:Class of a batched task, or a Gymnasium id."
    )
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Its options or arguments: names and values in turn."
    )
    steps: int | None = Field(
        None, ge=1, description="Steps to take; default an episode and some, 200 to 600."
    )


def run(arguments: list[str]) -> int:
    """Print what was found; 1 if the contract is broken."""
    command = parse("check", CheckCommand, arguments)
    config = env_config(command.task, command.options)
    agents = config.num_agents
    first = config.build_unchecked(agents)  # a name that stands for nothing is no finding
    longest = first.spec.max_episode_steps or 0
    first.close()
    steps = command.steps or min(max(longest + 20, 200), 600)
    findings = check_env(config.build_unchecked, steps, agents=agents)
    shown = render_findings(command.task, findings)
    command.show([asdict(finding) for finding in findings], shown)
    return int(any(finding.verdict == "failed" for finding in findings))


def env_config(target: str, options: dict[str, bool | int | float | str]) -> EnvConfig:
    """What a person means by a kind, a Gymnasium id, a PettingZoo module, or a task's class."""
    if target in ENVS.names():
        return ENVS.load(target).model_validate({"kind": target, **options})
    # Gymnasium's own way to name a package, package:Env-v0, has a colon as well.
    if ":" in target and not re.search(r"-v\d+$", target):
        found = load_object(target, "module:Class, such as my_module:MyTask or my_task.py:MyTask")
        if isinstance(found, type) and issubclass(found, EnvConfig):
            return ENVS.validate({"kind": target, **options})
        return ENVS.validate({"kind": "task", "task": target, "options": options})
    if re.fullmatch(r"\w+(\.\w+)*\.\w+_v\d+", target):
        return ENVS.validate({"kind": "pettingzoo", "parallel": target, "kwargs": options})
    gym = ENVS.load("gym").model_fields
    fields = {name: value for name, value in options.items() if name in gym}
    kwargs = {name: value for name, value in options.items() if name not in gym}
    return ENVS.validate({"kind": "gym", "id": target, "kwargs": kwargs, **fields})
