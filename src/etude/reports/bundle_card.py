"""The card of a bundle: what it is, how good it is, and how to use and to repeat it."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import yaml

from etude.core.trees import Tree
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs.folder import NOT_EXACT

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
