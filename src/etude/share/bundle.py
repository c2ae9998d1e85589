"""Bundles of runs: policy, ONNX, recipe, evaluation, films and a card; upload to a hub.

`etude.runs.bundle` reads and checks them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import yaml

from etude.core.errors import EtudeError, UsageError, describe_error
from etude.core.output import waiting
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
_OURS = [f"{folder}/*" for folder in (bundle.POLICY, bundle.ONNX, bundle.EVALUATION)]
_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


@dataclass(frozen=True)
class Shared:
    """The content of a bundle."""

    recipe: Recipe
    folder: RunFolder
    policy: Path
    """Path of the run, or of one of its checkpoints."""
    fingerprint: Tree
    """The fingerprint of the run; {} if its files were not kept."""
    another_run: str = ""
    """The reason why training the recipe again gives another run, as a sentence; "" for none."""
    license: str = ""
    episodes: int | None = None
    with_film: bool = True
    with_onnx: bool = True
    trust: bool = False


def write(shared: Shared, to: Path, say: Say) -> Examined:
    """Write a bundle as a folder, or as a tar if the name ends in .tar."""
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
    """Copy the log rows up to the newest checkpoint, which the fingerprint covers."""
    newest = checkpoint.newest_verified(run.checkpoints, lambda text: None, repair=False)
    position = {} if newest is None else checkpoint.load_document(newest)["metrics"]
    with to.open("xb") as stream:
        stream.writelines(blocks_of(run.metrics, position.get("bytes")))


def _copy_policy(source: Path, to: Path) -> None:
    """Copy the files of a policy after checking them."""
    policy_parts(source)
    chosen = policy_path(source)
    chosen = chosen / "policy" if (chosen / "policy").is_dir() else chosen
    files.new_folder(to)
    for name in sorted(os.listdir(chosen)):
        files.write_file(to / name, [(chosen / name).read_bytes()])


def _evaluate(shared: Shared, folder: Path, left_out: dict[str, str], say: Say) -> Tree:
    """Evaluate the policy, film it, and return the metrics."""
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
        evaluation.film_report(
            recipe, shared.policy, report, folder, say, title=recipes.title(recipe)
        )
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
    """README.md in Markdown, with a front matter for model hubs.

    about: the content of bundle.json; results: metrics of the evaluation; films: paths in the
    bundle.
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


def check_upload(repo: str) -> None:
    """Refuse an upload that cannot work, before the bundle is made."""
    if not _NAME.fullmatch(repo):
        raise UsageError(f"'{repo}' is not the name of a repository: write --upload USER/NAME.")
    _hub()


def upload(path: Path, repo: str, private: bool, say: Callable[[str], None]) -> str:
    """Upload the bundle at a path, a folder or a tar, to a repository; return its address.

    Only files in its index are uploaded, after a check. `huggingface_hub` takes the account from
    `hf auth login` or HF_TOKEN, and the hub from HF_ENDPOINT.
    """
    hub = _hub()
    with (
        tempfile.TemporaryDirectory(prefix="etude-upload-") as scratch,
        bundle.opened(path, Path(scratch) / "bundle") as folder,
    ):
        examined = bundle.examine(folder)
        for name, wrong in examined.wrong.items():
            raise EtudeError(f"{path} is not whole and was not uploaded: {name} {wrong}.")
        names = [bundle.INDEX, *examined.index["files"]]
        say(f"Uploading {len(names)} files to {repo}.")
        try:
            with waiting(f"uploading to {repo}"):
                api = hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
                url = api.create_repo(repo, private=private, exist_ok=True)
                api.upload_folder(
                    repo_id=repo,
                    folder_path=folder,
                    allow_patterns=names,
                    delete_patterns=_OURS,  # an earlier bundle may have had more files
                    commit_message=f"{examined.index.get('name')}, bundled by Etude",
                )
        except Exception as error:  # its errors are many, and some are of other packages
            raise EtudeError(
                f"{path} could not be uploaded to {repo}: {describe_error(error)[:300]}. It stays "
                f"where it is: etude bundle {path} --upload {repo} tries again."
            ) from error
    return str(url)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise UsageError(
            "An upload needs the package huggingface_hub: pip install 'etude[hub]'."
        ) from error
    return huggingface_hub
