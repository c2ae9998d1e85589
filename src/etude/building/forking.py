"""A branch of a run: its state at the beginning of an iteration as the checkpoint of a new run.

The branch has the log rows of the history that both share, and continues by `etude resume`, with
settings of its own. Its manifest names the run and the step that it branches from.
"""

from __future__ import annotations

from pathlib import Path

from etude.building.rewind import iteration_at, rewound
from etude.core.errors import UsageError
from etude.core.metrics import step_of
from etude.core.user_code import remember_trust
from etude.data.store.episodes import EpisodeStore
from etude.planning.plan import make_plan, render
from etude.planning.recipe import load, texts, with_changes
from etude.runs import checkpoint
from etude.runs.changes import CHANGES
from etude.runs.folder import RunFolder
from etude.runs.metrics_log import DiskHistory
from etude.training.saving import RUN
from etude.training.saving import step_of as step_of_clock

FORKED = "forked"
"""Field of the manifest: {"run", "step"} of the branch's origin."""


def fork(path: Path, step: int, to: Path, trust: bool = False) -> int:
    """Make a branch of a run at the beginning of the iteration of a step; returns its step."""
    parent = RunFolder.open(path, write=False)
    recipe = with_changes(load(parent.recipe, trust), parent, trust)
    loops = recipe.algorithm.loops(recipe, recipe.algorithm.geometry(recipe))
    with rewound(path, iteration_at(step, loops), trust=trust) as moment:
        moment.forward()
        if not moment.is_same:
            raise UsageError(f"{path} cannot be branched from exactly: {moment.notes[-1]}")
        clock = moment.loop.clock
        at = step_of_clock(clock)
        if clock.now.iterations == 0:
            raise UsageError(
                f"Step {step:,} is in the first iteration, before which nothing was learned: "
                f"`etude train {parent.recipe}` with the changed setting is that branch."
            )
        policy, training = moment.state()
        contract = moment.loop.algorithm.policy_parts()[1]
        plan = make_plan(moment.run, begun=True)
        manifest = parent.manifest()
        manifest[CHANGES] = [c for c in manifest.get(CHANGES, []) if int(c["step"]) <= at]
        manifest[FORKED] = {"run": str(Path(path).absolute()), "step": at}
        text = parent.recipe.read_text()
        folder = RunFolder.create(Path(to), text, render(plan), plan.to_json(), manifest)
        with folder:
            remember_trust(folder.recipe, texts(recipe))
            log = folder.metrics_log()
            for row in DiskHistory(parent.metrics):
                if step_of(row) > at:
                    break
                log.append(row)
            training["metrics"] = log.state_dict()
            log.close()
            stores = training.get("algorithm", {}).get("stores", {})
            for number, name in enumerate(sorted(stores)):
                part = f"replay/shard-{number}"
                if (moment.scratch / part).is_dir():
                    EpisodeStore.copy(moment.scratch / part, stores[name], folder.path / part)
            training[RUN] = folder.copies()
            checkpoint.save(folder.checkpoints, at, (policy, contract), training)
    return at
