"""Environments: MuJoCo in batches, tasks in numpy, adapters for those of other packages."""

ENVS = {
    "gym": "etude.envs.adapters.gym:GymConfig",
    "pettingzoo": "etude.envs.adapters.pettingzoo:PettingZooConfig",
    "task": "etude.envs.named_task:TaskConfig",
}
DEFAULT_TASK = "etude.tasks.seek:Seek"
"""The task of the kind `task` where none is named."""
NAMED_BY = {"id": "gym", "task": "task", "parallel": "pettingzoo"}
"""{field: kind}: `--env.<field>` alone chooses the kind of environment."""
