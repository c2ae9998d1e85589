"""Etude's own recipes for the tasks: other settings than those that all share."""

from __future__ import annotations

import etude
from benchmarks.progress import main
from benchmarks.runners.etude import RESUMES, run

if __name__ == "__main__":
    raise SystemExit(
        main(
            lambda progress: run(progress, etude.recipes.find(progress.task.name)),
            package="",
            resumes=RESUMES,
            note="its value function also reads what the policy may not",
        )
    )
