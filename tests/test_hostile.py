"""Run folders and policies from strangers: no code runs, nothing is written outside, and each ends
in one sentence within bounds of time and memory."""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import etude
from etude.api import Run, resume, train
from etude.cli import main as cli
from etude.core import user_code
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import EtudeError, UsageError
from etude.core.trees import Tree
from etude.models.policies import PolicyConfig, make_policy
from etude.planning import recipes
from etude.runs import checkpoint, files
from etude.runs.documents import decode_json, encode_json
from etude.training.saving import RUN
from toys import tiny_reach

PATIENCE = 10.0
ROOM = 1 << 30
"""Bytes of memory that a refusal may take on the way."""


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "untouched"
    train(tiny_reach(2), path)
    return path


@contextmanager
def bounds() -> Iterator[None]:
    """Whatever happens here takes little time and memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    begin = time.monotonic()
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - begin < PATIENCE


def sentence(error: BaseException) -> str:
    """The message of an error, which is short and on one line."""
    assert "\n" not in str(error)
    assert len(str(error)) < 1500
    return str(error)


# Policies whose every hash is right.


def put(*names: str, value: Any) -> Callable[[Tree, Tree], None]:
    def change(contract: Tree, arrays: Tree) -> None:
        for name in names[:-1]:
            contract = contract[name]
        contract[names[-1]] = value

    return change


def drop(*names: str) -> Callable[[Tree, Tree], None]:
    def change(contract: Tree, arrays: Tree) -> None:
        for name in names[:-1]:
            contract = contract[name]
        del contract[names[-1]]

    return change


def array(name: str, value: Any) -> Callable[[Tree, Tree], None]:
    def change(contract: Tree, arrays: Tree) -> None:
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = value

    return change


POLICIES: dict[str, Callable[[Tree, Tree], None]] = {
    "no policy": drop("policy"),
    "no observations": drop("observations"),
    "no action": drop("action"),
    "no format": drop("format"),
    "format of text": put("format", value="1"),
    "policy a list": put("policy", value=[1]),
    "observations a list": put("observations", value=[["state", 3]]),
    "observations empty": put("observations", value={}),
    "observation a number": put("observations", "state", value=3),
    "no shape": drop("observations", "state", "shape"),
    "shape negative": put("observations", "state", "shape", value=[-1]),
    "shape of 2^40": put("observations", "state", "shape", value=[2**40]),
    "shape of 10^30": put("observations", "state", "shape", value=[10**30]),
    "shape of text": put("observations", "state", "shape", value="25"),
    "type an object": put("observations", "state", "dtype", value="O"),
    "action a number": put("action", value=7),
    "action of a kind": put("action", "kind", value="os.system"),
    "bounds unequal": put("action", "low", value=[-1.0]),
    "bounds infinite": put("action", "high", value=[float("inf")] * 7),
    "sizes of a box": put("action", "sizes", value=[2**62]),
    "choices of 10^9": put("action", value={"kind": "discrete", "sizes": [10**9]}),
    "kind a pickle": put("policy", "kind", value="pickle"),
    "unknown field": put("policy", "code", value="import os"),
    "60,000 units": put("policy", "hidden", value=[60_000, 60_000]),
    "a million units": put("policy", "hidden", value=[1 << 20]),
    "10^30 units": put("policy", "hidden", value=[10**30]),
    "100,000 layers": put("policy", "hidden", value=[1] * 100_000),
    "units negative": put("policy", "hidden", value=[-64]),
    "memory of 2^20": put("policy", value={"kind": "lstm", "hidden": [], "units": 1 << 20}),
    "reads nothing": put("policy", "actor_reads", value=[]),
    "reads what is not": put("policy", "actor_reads", value=["secret"]),
    "activation of code": put("policy", "activation", value="__import__"),
    "long name": put("policy", "x" * 500_000, value=1),
    "20,000 names": put("observations", value={str(n): n for n in range(20_000)}),
    "array missing": array("actor.weight0", None),
    "array too many": array("extra", np.zeros(3, np.float32)),
    "array of a shape": array("actor.weight0", np.zeros((3, 3), np.float32)),
    "array of a type": array("log_std", np.zeros(7, np.int64)),
    "array a group": array("log_std", {"a": np.zeros(7, np.float32)}),
}


@pytest.mark.parametrize("case", POLICIES)
def test_hostile_policies(case: str, untouched: Path, tmp_path: Path) -> None:
    arrays, contract = checkpoint.load_policy_parts(untouched / "checkpoints" / "latest")
    POLICIES[case](contract, arrays)
    path = checkpoint.save(tmp_path, 1, (arrays, contract), None)
    with bounds(), pytest.raises(EtudeError) as caught:
        etude.load_policy(path)
    sentence(caught.value)


def test_a_name_that_torch_refuses(untouched: Path, tmp_path: Path) -> None:
    arrays, contract = checkpoint.load_policy_parts(untouched / "checkpoints" / "latest")
    contract["observations"] = {"a.b": contract["observations"]["state"]}
    contract["policy"] |= {"actor_reads": ["a.b"], "critic_reads": ["a.b"]}
    with pytest.raises(UsageError, match="No network can be built"):
        etude.load_policy(checkpoint.save(tmp_path, 1, (arrays, contract), None))


def test_a_policy_whose_kind_is_code_needs_trust(
    untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_kind.py").write_text(
        "from etude.models.policies import PolicyConfig\n"
        "class Mine(PolicyConfig):\n    kind: str = 'mine'\n"
        "    def build(self, *parts):\n        plain = self.model_dump() | {'kind': 'mlp'}\n"
        "        return PolicyConfig(**plain).build(*parts)\n"
    )
    monkeypatch.chdir(tmp_path)
    arrays, contract = checkpoint.load_policy_parts(untouched / "checkpoints" / "latest")
    contract["policy"]["kind"] = "my_kind:Mine"
    path = checkpoint.save(tmp_path, 1, (arrays, contract), None)
    with pytest.raises(UsageError, match="trust=True"):
        etude.load_policy(path)
    assert etude.load_policy(path, trust=True).act(np.zeros(contract_size(contract))).shape
    assert etude.load_policy(path).policy  # it is remembered


def contract_size(contract: Any) -> int:
    return int(contract["observations"]["state"]["shape"][0])


@pytest.mark.parametrize(("part", "unit"), [("policy", b"1,"), ("training", b"[],")])
def test_sixty_megabytes_of_json(part: str, unit: bytes, untouched: Path, tmp_path: Path) -> None:
    newest = (untouched / "checkpoints" / "latest").resolve()
    path = tmp_path / newest.name
    shutil.copytree(newest, path)
    bomb = b'{"x": [' + unit * ((60 << 20) // len(unit)) + b"1]}\n"
    (path / part / checkpoint.DOCUMENTS[part]).write_bytes(bomb)
    reseal(path)
    with bounds(), pytest.raises(EtudeError, match="is larger than"):
        checkpoint.load_training(path)


def reseal(path: Path) -> None:
    """Make every manifest fit the files again."""
    pins = None
    for part, document in checkpoint.DOCUMENTS.items():
        content = {
            name: (path / part / name).read_bytes() for name in (checkpoint.ARRAYS, document)
        }
        listed = {
            name: files.Written(len(data), hashlib.sha256(data).hexdigest())
            for name, data in content.items()
        }
        manifest = checkpoint._manifest(part, int(path.name), listed, pins)
        (path / part / checkpoint.MANIFEST).write_bytes(manifest)
        pins = hashlib.sha256(manifest).hexdigest()


@pytest.mark.parametrize(("width", "actions"), [(3, 7), (25, 2)])
def test_a_policy_of_another_task_is_refused(
    width: int, actions: int, untouched: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(untouched, tmp_path / "run", symlinks=True))
    newest = (run / "checkpoints" / "latest").resolve()
    training = checkpoint.load_training(newest)[2]
    box = ActionSpec("box", low=(-1.0,) * actions, high=(1.0,) * actions)
    spec = EnvSpec({"state": ArraySpec((width,))}, box, 10)
    policy = make_policy(PolicyConfig(), spec, None)
    parts_of_it = dict(policy.state_dict()), policy.contract()
    checkpoint.save(run / "checkpoints", int(newest.name), parts_of_it, training)
    checkpoint.mark(run / "checkpoints", "best", int(newest.name))
    with pytest.raises(UsageError, match=r"trained on another task|do not match this task"):
        Run(run).evaluate(8)
    with pytest.raises(UsageError, match="its policy does not fit this run"):
        resume(run)


STATES: dict[str, Callable[[Tree], object]] = {
    "no clock": lambda t: t["clock"].clear(),
    "clock of text": lambda t: t["clock"].update(dict.fromkeys(t["clock"], "x")),
    "no optimizer": lambda t: t["algorithm"].clear(),
    "snapshots cut": lambda t: t["collector"].clear(),
    "board of numbers": lambda t: t.update(board={"cycle": 3}),
    "saver empty": lambda t: t.update(saver={}),
}


@pytest.mark.parametrize("case", STATES)
def test_hostile_training_states(case: str, untouched: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(untouched, run, symlinks=True)
    newest = (run / "checkpoints" / "latest").resolve()
    arrays, contract, training = checkpoint.load_training(newest)
    STATES[case](training)
    checkpoint.save(run / "checkpoints", int(newest.name), (arrays, contract), training)
    with pytest.raises(UsageError, match="does not fit this run") as caught:
        resume(run)
    sentence(caught.value)


# Folders.

MARK = "raise SystemExit(open({!r}, 'w').write('code ran'))\n"
"""What hostile code does."""


def edit(run: Path, **sections: dict[str, Any]) -> None:
    content = yaml.safe_load((run / "recipe.yaml").read_text())
    content["env"] = sections.pop("env", content["env"])
    content = {
        name: part | sections[name] if name in sections else part for name, part in content.items()
    }
    text = yaml.safe_dump(content)
    (run / "recipe.yaml").write_text(text)
    for path in checkpoint.resumable(run / "checkpoints"):  # each holds a copy
        state = path / "training" / checkpoint.DOCUMENTS["training"]
        document = decode_json(state.read_bytes())
        document[f"{RUN}/recipe"] = text
        state.write_bytes(encode_json(document))
        reseal(path)


def code(run: Path, outside: Path) -> None:
    """Code in the folder, in the current folder, and as a package."""
    text = MARK.format(str(outside / "trace"))
    package = run.parent / "hostile_package"
    package.mkdir()
    for place in (run / "hostile.py", run.parent / "hostile_here.py", package / "__init__.py"):
        place.write_text(text)
    (package / "inside.py").write_text(text)


CODE: dict[str, dict[str, Any]] = {
    "file in the folder": {"env": {"kind": "task", "task": "run/hostile.py:Task"}},
    "file of the folder above": {"env": {"kind": "task", "task": "run/../hostile_here.py:Task"}},
    "module": {"env": {"kind": "task", "task": "hostile_here:Task"}},
    "module of a package": {"env": {"kind": "task", "task": "hostile_package.inside:Task"}},
    "PettingZoo module": {"env": {"kind": "pettingzoo", "parallel": "hostile_here"}},
    "PettingZoo package": {"env": {"kind": "pettingzoo", "parallel": "hostile_package.inside"}},
    "PettingZoo factory": {"env": {"kind": "pettingzoo", "parallel": "hostile_here:make"}},
    "PettingZoo file": {"env": {"kind": "pettingzoo", "parallel": "run/hostile.py:make"}},
    "installed function": {"env": {"kind": "pettingzoo", "parallel": "os:system"}},
    "Gymnasium package": {"env": {"kind": "gym", "id": "hostile_here:Task-v0"}},
    "Gymnasium by another": {
        "env": {"kind": "gym", "id": "GymV26Environment-v0", "kwargs": {"env_id": "hostile_here:A"}}
    },
    "text in binary": {"env": {"kind": "task", "task": b"hostile_here:Task"}},
    "Ray cluster": {"collector": {"kind": "ray", "address": "127.0.0.1:6379"}},
}


@pytest.fixture
def run(untouched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's copy of a run, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("mine")
    return Path(shutil.copytree(untouched, tmp_path / "run", symlinks=True))


def outside_of(run: Path) -> dict[str, bytes]:
    outside = run.parent / "outside"
    return {path.name: path.read_bytes() for path in outside.rglob("*") if path.is_file()}


@pytest.mark.parametrize("verb", [["eval"], ["resume"], ["plan"], ["train"]])
@pytest.mark.parametrize("case", CODE)
def test_code_that_a_folder_names_does_not_run(
    case: str, verb: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "Ray cluster" and verb == ["eval"]:
        pytest.skip("an evaluation plays in this process")
    code(run, run.parent / "outside")
    edit(run, **CODE[case])
    target = "run" if verb[0] in ("eval", "resume") else "run/recipe.yaml"
    path = list(sys.path)
    assert cli.main([*verb, target]) == UsageError.exit_code
    said = capsys.readouterr().err
    assert "--trust" in said
    assert str(run / "recipe.yaml") in said
    assert said.count("\n") == 1
    assert outside_of(run) == {"precious": b"mine"}
    assert sys.path == path


def bomb(levels: int = 30) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"name: *a{levels - 1}"])


RECIPES: dict[str, str] = {
    "a billion laughs": bomb(),
    "itself": "name: &a [*a]\nclock: *a",
    "ten megabytes": "name: [" + "1, " * 3_500_000 + "1]",
    "deep": "name: " + "[" * 1_000,
    "an object": "name: !!python/object/apply:os.system ['touch outside/trace']",
    "a name": "name: !!python/name:os.system",
    "a broken time": "name: !!timestamp x",
    "a broken number": "seed: !!int ''",
    "a number of 10,000 digits": "seed: " + "9" * 10_000,
    "a list": "[1, 2]",
    "nothing": "",
    "bytes": "name: \x00",
    "a long field": f"{'x' * 100_000}: 1",
    "many fields": "\n".join(f"f{n}: 1" for n in range(3_000)),
}


@pytest.mark.parametrize("case", RECIPES)
def test_hostile_recipes(case: str, run: Path) -> None:
    before = Run(run).recipe
    (run / "recipe.yaml").write_text(RECIPES[case])
    with bounds(), pytest.raises(UsageError) as caught:
        recipes.load(run / "recipe.yaml")
    sentence(caught.value)
    with bounds():
        assert Run(run).recipe == before  # by the copy in the newest checkpoint
    assert outside_of(run) == {"precious": b"mine"}


LINKS = [".lock", "metrics.jsonl", "checkpoints", "evaluations", "evaluations/x", "failures"]
LINKS += ["events.out.tfevents.1", "summary.json", "wandb", "wandb.json"]
LINKS += [".tmp-wandb.json", "checkpoints/best", "checkpoints/latest", "recipe.yaml"]


@pytest.mark.parametrize("verb", ["eval", "resume"])
@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link(
    name: str, verb: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run / name
    target = run.parent / "outside"
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    elif not name.startswith("checkpoints/"):
        target = target / "precious"
    if name == "recipe.yaml":
        target = run.parent / "outside" / "recipe"
        shutil.copy(place, target)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target)
    before = outside_of(run)
    assert cli.main([verb, str(run)]) == UsageError.exit_code
    assert "is a symbolic link" in capsys.readouterr().err
    assert outside_of(run) == before


def test_a_manifest_of_sixty_megabytes(run: Path) -> None:
    (run / "manifest.json").write_bytes(b'{"x": [' + b"[]," * (20 << 20) + b"1]}")
    with bounds(), pytest.raises(EtudeError, match="is not valid JSON"):
        Run(run).folder.manifest()


# Trust that is given.

TASK = """
import etude
from etude.tasks.seek import Seek

class Task(Seek):
    pass
"""


def own_recipe(task: str) -> etude.Recipe:
    return recipes.validated(
        {
            **recipes.ppo().model_dump(),
            "env": {"kind": "task", "task": task},
            "collector": {"num_envs": 8, "envs_per_group": 4, "threads": 1},
            "algorithm": {
                "kind": "ppo",
                "rollout_steps": 8,
                "minibatch_size": 64,
                "update_epochs": 1,
            },
            "clock": {"total_timesteps": 64, "cycles": 1, "iterations": 1},
            "evaluation": {"episodes": 4, "num_envs": 4, "envs_per_group": 4, "final_episodes": 0},
        },
        "test",
    )


def forget() -> None:
    """As in another process."""
    for memory in (user_code._doubted, user_code._vouched, user_code._used):
        memory.clear()


def test_trust_is_asked_once_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "own_task.py"
    task.write_text(TASK)
    made = train(own_recipe("own_task.py:Task"), "mine")
    forget()
    resume("mine")  # who trained it has named its code

    forget()
    shutil.copytree(made.path, "copy", symlinks=True)
    with pytest.raises(user_code.Untrusted, match=f"would import own_task.py from {task}"):
        Run("copy").evaluate(4)
    assert Run("copy").rows()  # only code needs trust
    forget()
    Run("copy", trust=True).evaluate(4)
    forget()
    Run("copy").evaluate(4)
    task.write_text(TASK + "\n# another version\n")
    forget()
    with pytest.raises(user_code.Untrusted, match="has changed since it was trusted"):
        Run("copy").evaluate(4)
    forget()
    assert cli.main(["eval", "copy", "--episodes", "4", "--trust"]) == 0
    forget()
    assert cli.main(["eval", "copy", "--episodes", "4"]) == 0
    forget()
    resume("mine")  # one's own code may change
    kept = next((Path(user_code._store(tmp_path)).parent).iterdir()).read_text()
    assert set(json.loads(kept)) == {"file", "code"}


def test_what_is_typed_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_typed.py").write_text(TASK)
    (tmp_path / "strange.yaml").write_text(recipes.dump(own_recipe("own_typed.py:Task")))
    assert cli.main(["plan", "strange.yaml"]) == UsageError.exit_code
    forget()
    assert cli.main(["plan", "strange.yaml", "--env.task", "own_typed.py:Task"]) == 0
    forget()
    assert cli.main(["plan", "strange.yaml", "--env.task", "etude.tasks.seek:Seek"]) == 0
    forget()
    assert cli.main(["train", "strange.yaml", "--trust", "--folder", "made"]) == 0
    forget()
    assert cli.main(["eval", "made", "--episodes", "4"]) == 0


KIND = """
open("imported", "a").close()
import torch
from etude.models.actor_critic import ModulePolicyConfig


class Kind(ModulePolicyConfig):
    def network(self, num_inputs, num_outputs):
        return torch.nn.Linear(num_inputs, num_outputs)
"""


def test_a_kind_that_a_file_names_is_not_imported_without_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_kind.py").write_text(KIND)
    plain = own_recipe("etude.tasks.seek:Seek").model_dump(mode="json")
    named, path = "own_kind.py:Kind", tmp_path / "strange.yaml"
    for section, kind in (("policy", named), ("policy", [named]), ("algorithm", named)):
        path.write_text(yaml.safe_dump({**plain, section: {"kind": kind}}))
        with pytest.raises(UsageError, match=r"is not trusted here|not 'list'"):
            recipes.load(path)
    path.write_text(yaml.safe_dump({**plain, "logs": {"writers": [named]}}))
    with pytest.raises(user_code.Untrusted):
        recipes.load(path)
    assert not (tmp_path / "imported").exists()

    path.write_text(yaml.safe_dump({**plain, "policy": {"kind": named}}))
    made = train(recipes.load(path, trust=True), "mine")
    forget()
    resume("mine")
    shutil.copytree(made.path, "copy", symlinks=True)
    forget()
    before = Path("copy/recipe.yaml").read_bytes()
    for refused in (Run, resume):
        with pytest.raises(user_code.Untrusted, match=r"copy/recipe.yaml names"):
            refused("copy")
    assert Path("copy/recipe.yaml").read_bytes() == before  # it is not taken for damaged
    resume("copy", trust=True)
    forget()
    Run("copy", trust=True).evaluate(4)


def test_trust_that_cannot_be_kept_still_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_kept.py").write_text(TASK)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    train(own_recipe("own_kept.py:Task"), "made")
    resume("made")
    assert "could not be kept" in capsys.readouterr().err
    forget()
    with pytest.raises(user_code.Untrusted):
        resume("made")
    resume("made", trust=True)


@pytest.mark.parametrize("number", ["9" * 4_000, "190" + ":59" * 10_000])
def test_a_number_too_long_to_print_is_one_sentence(number: str, tmp_path: Path) -> None:
    from etude.planning.recipe import parsed

    with pytest.raises(UsageError, match="a whole number of more than 1024 bits"):
        parsed(f"name: {number}\n".encode(), "recipe.yaml", tmp_path / "recipe.yaml")
