"""`etude check`: test whether an environment keeps the contract that training relies on."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import Field

from etude.cli.options import Positional, Reporting, parse
from etude.cli.target import env_config
from etude.envs.check import check_env, render_findings


class CheckCommand(Reporting):
    """Test whether an environment keeps the contract that training relies on."""

    task: Positional[str] = Field(
        description="module:Class or file.py:Class of a batched task, or a Gymnasium id."
    )
    options: dict[str, bool | int | float | str] = Field(
        {}, description="Options or keyword arguments of the environment: NAME VALUE pairs."
    )
    steps: int | None = Field(
        None, ge=1, description="Steps to take; default: 20 more than an episode, 200 to 600."
    )


def run(arguments: list[str]) -> int:
    """Print the findings; 1 if the contract is broken."""
    command = parse("check", CheckCommand, arguments)
    config = env_config(command.task, command.options)
    agents = config.num_agents
    first = config.build_unchecked(agents)  # errors in the name end the command here
    longest = first.spec.max_episode_steps or 0
    first.close()
    steps = command.steps or min(max(longest + 20, 200), 600)
    findings = check_env(config.build_unchecked, steps, agents=agents)
    text = render_findings(command.task, findings)
    command.show([asdict(finding) for finding in findings], text)
    return int(any(finding.verdict == "failed" for finding in findings))
