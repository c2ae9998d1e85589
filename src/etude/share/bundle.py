"""A bundle of a run is made: policy, ONNX, recipe, evaluation, films and the card that says it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.evaluate import evaluation, fresh
from etude.planning import recipes
from etude.planning.loading import policy_parts, policy_path
from etude.planning.recipe import Recipe
from etude.runs import bundle, checkpoint, files
from etude.runs.bundle import Examined
from etude.runs.folder import NOT_EXACT, RunFolder
from etude.runs.metrics_log import blocks_of

Say = Callable[[str], None]
FILM, ONNX, EVALUATION = "film", "ONNX", "evaluation"


@dataclass(frozen=True)
class Shared:
    """What of a run goes into a bundle."""

    recipe: Recipe
    folder: RunFolder
    policy: Path
    """The run, or one of its checkpoints."""
    fingerprint: Tree
    """Of the run; {} where what it is made of was not kept."""
    another_run: str = ""
    """Why training the recipe again would give another run, as a sentence; "" if it would not."""
    license: str = ""
    episodes: int | None = None
    with_film: bool = True
    with_onnx: bool = True
    trust: bool = False


def write(shared: Shared, to: Path, say: Say) -> Examined:
    """Write a bundle as a folder, or as a tar where the name ends in .tar; it appears whole."""
    if os.path.lexists(to) and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} is there already: name a new folder, or remove this one.")
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        made = _fill(shared, scratch, say)
        if to.suffix == bundle.TAR:
            bundle.pack(scratch, to)
        else:
            scratch.chmod(0o755)
            files.move_folder(scratch, to)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return made


def _fill(shared: Shared, folder: Path, say: Say) -> Examined:
    recipe, run = shared.recipe, shared.folder
    manifest = run.manifest()
    texts = {
        bundle.RECIPE: recipes.dump(recipe),
        bundle.MANIFEST: run.copies()["manifest"],
    }
    for name, text in texts.items():
        files.write_file(folder / name, [text.encode()])
    _copy_rows(run, folder / bundle.METRICS)
    fresh.load(shared.policy, shared.trust)  # refuses a run that has learned a reward alone
    _copy_policy(shared.policy, folder / bundle.POLICY)
    left_out: dict[str, str] = {}
    results = _evaluate(shared, folder / bundle.EVALUATION, left_out, say)
    if shared.with_onnx:
        from etude.share.export import export

        source, to = shared.policy, folder / bundle.ONNX
        try:
            export(recipe, source, to, shared.fingerprint, shared.trust)
        except UsageError as error:
            left_out[ONNX] = str(error)
    else:
        left_out[ONNX] = ""
    for name, why in left_out.items():
        if why:
            say(f"Without {name}: {why}")
    about = {
        "name": recipe.name,
        "seed": recipe.seed,
        "license": shared.license,
        "policy_step": fresh.step_of(shared.policy),
        "fingerprint": shared.fingerprint,
        "exactness": str(manifest.get("exactness", "")),
        "another_run": shared.another_run,
        "left_out": left_out,
    }
    films = sorted(f"{bundle.EVALUATION}/{p.name}" for p in folder.glob("evaluation/*.webp"))
    text = card(recipe, about, manifest, results, films)
    files.write_file(folder / bundle.CARD, [text.encode()])
    return bundle.seal(folder, about)


def _copy_rows(run: RunFolder, to: Path) -> None:
    """The rows that the newest checkpoint has seen: those of the fingerprint."""
    newest = checkpoint.newest_verified(run.checkpoints, lambda text: None, repair=False)
    position = {} if newest is None else checkpoint.load_document(newest)["metrics"]
    with to.open("xb") as stream:
        stream.writelines(blocks_of(run.metrics, position.get("bytes")))


def _copy_policy(source: Path, to: Path) -> None:
    """The files of a policy, once each has been found whole."""
    policy_parts(source)
    chosen = policy_path(source)
    chosen = chosen / "policy" if (chosen / "policy").is_dir() else chosen
    files.new_folder(to)
    for name in sorted(os.listdir(chosen)):
        files.write_file(to / name, [(chosen / name).read_bytes()])


def _evaluate(shared: Shared, folder: Path, left_out: dict[str, str], say: Say) -> Tree:
    """Fresh episodes of the policy, and films of them; their metrics."""
    recipe = shared.recipe
    if recipe.env is None:
        why = f"The recipe '{recipe.name}' has no environment to act in."
        left_out |= {EVALUATION: why, FILM: why}
        return {}
    episodes = shared.episodes or recipe.evaluation.final_episodes or None
    report = evaluation.played(recipe, shared.policy, episodes)
    files.new_folder(folder)
    report.write(folder)
    say(report.render())
    if not shared.with_film:
        left_out[FILM] = ""
        return report.metrics()
    try:
        from etude.evaluate import film

        film.check(recipe)
        say(f"Filming: {', '.join(dict.fromkeys(report.scenes)) or 'an episode'}.")
        played, scenes = report.fresh, report.scenes
        film.film(recipe, shared.policy, played, scenes, folder, film.SMALL, recipe.name)
    except EtudeError as error:
        left_out[FILM] = str(error)
    return report.metrics()


_RESULTS = {
    "eval/success_rate": ("success", "{:.1%}"),
    "eval/mean_reward": ("mean return of an episode", "{:,.2f}"),
    "eval/mean_ep_length": ("mean length, control steps", "{:,.1f}"),
}
_FILES = {
    "policy/": "weights with the normaliser: `etude.load_policy`",
    "onnx/": "the same for `etude-runtime`, without torch; `policy.json` says what it reads",
    "evaluation/": "a line per episode, and films where there are any",
    "recipe.yaml": "what was trained",
    "manifest.json": "with which versions, on which CPU",
    "metrics.jsonl": "the curves of the training",
    "bundle.json": "size and SHA-256 of every file",
}
_USE = """\
```
etude verify .          # hashes, then the same episodes again
etude play . --web      # watch it
```

```python
import etude

policy = etude.load_policy("PATH-OF-THIS-FOLDER")
action = policy.act(observation)
```"""


def card(recipe: Recipe, about: Tree, manifest: Tree, results: Tree, films: list[str]) -> str:
    """README.md in Markdown, with the fields that model hubs read before it.

    about: what bundle.json says; results: metrics of the evaluation; films: paths in the bundle.
    """
    parts = [
        _front_matter(about),
        f"# {about['name']}",
        _summary(recipe, about),
        *(f"![{PurePath(film).stem}]({film})" for film in films[-1:]),
        "## Results",
        _results(results),
        "## Use it",
        _USE,
        "## Repeat it",
        _repeat(about),
        "## Made with",
        _made_with(manifest),
        "## Licence",
        about["license"] or "None is stated: ask who made it before you use it.",
        "## Files",
        _table(("file", "what it is"), [(f"`{name}`", text) for name, text in _files(about)]),
        *(f"Without {name}: {why}" for name, why in about["left_out"].items() if why),
        "None of the files is code.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(about: Tree) -> str:
    fields: dict[str, Any] = {"library_name": "etude"}
    if about["license"]:
        fields["license"] = about["license"]
    fields["tags"] = ["robotics", "reinforcement-learning", "etude"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _summary(recipe: Recipe, about: Tree) -> str:
    known = recipe.name in recipes.names()
    purpose = f"{recipes.purpose(recipe.name).rstrip('.')}. " if known else ""
    changed = recipes.changed(recipe)
    return (
        f"{purpose}A policy of {recipe.algorithm.kind}, seed {recipe.seed}, after "
        f"{about['policy_step']:,} environment steps, trained with Etude"
        + (f"; changed in the recipe: {changed}." if changed else ".")
    )


def _results(results: Tree) -> str:
    if not results:
        return "The recipe has no environment: nothing was played."
    rows = [
        (label, shown.format(results[name]))
        for name, (label, shown) in _RESULTS.items()
        if name in results
    ]
    if "eval/success_low" in results:
        low, high = results["eval/success_low"], results["eval/success_high"]
        rows[0] = (rows[0][0], f"{rows[0][1]} (95 % interval {low:.1%} to {high:.1%})")
    return (
        f"{results['eval/episodes']:.0f} fresh episodes, deterministic actions, seed "
        f"{results['seed']}:\n\n"
        f"{_table(('metric', 'value'), rows)}\n\n"
        "`evaluation/report.txt` has more, `evaluation/episodes.csv` every episode."
    )


def _repeat(about: Tree) -> str:
    lines = ["```", "etude train recipe.yaml", "etude verify . --retrain", "```", ""]
    if about["another_run"]:
        lines.append(f"This gives another run: {about['another_run']}")
    elif about["exactness"].startswith(NOT_EXACT):
        lines.append(f"The run is {about['exactness']}; training it again gives other bits.")
    else:
        lines.append("On such a CPU, with such versions, both give a run of this fingerprint:")
    prints = [(f"`{name}`", f"`{sha}`") for name, sha in about["fingerprint"].items()]
    return "\n".join([*lines, "", _table(("fingerprint", "SHA-256"), prints)])


def _files(about: Tree) -> list[tuple[str, str]]:
    missing = {f"{name.lower()}/" for name in about["left_out"]}
    return [(name, text) for name, text in _FILES.items() if name not in missing]


def _made_with(manifest: Tree) -> str:
    versions = {n: v for n, v in manifest.get("versions", {}).items() if v}
    cpu, system = manifest.get("cpu", {}), manifest.get("system", {})
    rows = [
        *versions.items(),
        ("CPU", f"{cpu.get('model', '')} ({cpu.get('capability', '')})"),
        ("system", f"{system.get('os', '')} {system.get('machine', '')}, {system.get('libc', '')}"),
    ]
    return _table(("", "version"), rows)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    lines = [head, ("---", "---"), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
