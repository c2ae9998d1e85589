"""Exported policies: the same actions without torch, and a contract that says what they read."""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
import onnx

from etude import mj
from etude.cli.main import main
from etude.core.contracts import ActionSpec
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.envs.mujoco.env import MujocoEnv
from etude.envs.mujoco.task import Group, Observation
from etude.models.policies import BasePolicy, PolicyConfig, make_policy
from etude.planning import recipes
from etude.planning.recipe import Recipe
from etude.runs import onnx_files
from etude.share import export as exporting
from etude.tasks.velocity import WalkConfig
from etude_runtime import ContractError, JointTargets, Policy, Trot
from etude_runtime.__main__ import main as run_runtime
from etude_runtime.measuring import Reader
from installing import ENVIRONMENT, ROOT, build, install

STEPS = 1000
THOUSAND = ("walk-go1", "reach-memory", "chunks")
"""Exports that so many steps are recorded of: asymmetric, recurrent, chunked."""


def trained(recipe: Recipe) -> BasePolicy:
    """A policy with weights and statistics as training leaves them: none is zero."""
    env = recipe.task.make(1)
    policy = make_policy(recipe.policy, env.spec, Key(3))
    rng = np.random.default_rng(0)
    for name, size in policy.vectors.items():
        mean, spread = 0.05 * rng.normal(size=size), rng.uniform(1e-3, 2.0, size)
        moments = {"count": np.array(100.0), "mean": mean, "m2": 100.0 * spread**2}
        policy.absorb({name: moments})
    with torch.no_grad():
        named = policy.named_parameters()
        *_, last = [x for name, x in named if name.startswith(("actor.weight", "head.weight"))]
        last.mul_(20.0)  # a new policy hardly acts
    return policy


def made(name: str) -> Recipe:
    """A recipe; the value functions of the first two read what their actors do not."""
    if name == "cartpole":
        return recipes.find("ppo").replace("env.id", "CartPole-v1")
    if name == "pendulum":  # actions in [-2, 2]
        sac = recipes.find("sac").replace("env.id", "Pendulum-v1")
        return sac.replace(policy=PolicyConfig(kind="squashed", hidden=(16,)))
    if name == "seek-pictures":
        return recipes.find(name)
    if name == "chunks":
        chunks = {"kind": "act", "history": 3, "chunk": 6, "width": 32, "layers": 1}
        return recipes.find("pick-place-bc").replace(policy=chunks)
    recipe = recipes.find(name)
    assert set(recipe.policy.critic_reads) > set(recipe.policy.actor_reads)
    return recipe


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of an asymmetric MLP, an LSTM, a discrete, a chunked, a squashed policy, and of one
    that sees."""
    folder, found = tmp_path_factory.mktemp("exports"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting.fresh, "step_of", lambda path: 7)
        for name in ("walk-go1", "reach-memory", "cartpole", "chunks", "seek-pictures", "pendulum"):
            recipe = made(name)
            policy = trained(recipe)
            patch.setattr(exporting.fresh, "load", lambda path, trust, policy=policy: policy)
            steps = STEPS if name in THOUSAND else 200
            exporting.export(recipe, folder, folder / name, {"policy": "0" * 64}, steps=steps)
            found[name] = folder / name
    return found


@pytest.fixture
def copied(exports: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exports["walk-go1"], tmp_path / "copy"))


@pytest.mark.rotated(together=True)
def test_recorded_steps_replay_without_torch(exports: dict[str, Path], tmp_path: Path) -> None:
    """The wheel of the runtime, in an environment that has only what it asks for."""
    pytest.importorskip("build")
    wheel, _ = build(ROOT / "runtime", tmp_path)
    commands = install(wheel, tmp_path / "env")

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)

    for package in ("torch", "etude", "onnx", "mujoco", "pydantic"):
        missing = run(commands / "python", "-c", f"import {package}").stderr
        assert f"No module named '{package}'" in missing, package
    for name, folder in exports.items():
        done = run(commands / "etude-runtime", folder, "--steps", "2000")
        assert done.returncode == 0, done.stderr
        *_, replay, timing = done.stdout.splitlines()
        steps = STEPS if name in THOUSAND else 200
        assert replay.startswith(f"replay  {steps:,} recorded steps, largest difference ")
        assert float(replay.split()[-1]) <= 1e-5
        assert re.search(r"median .* 99\.9 %", timing), timing
        print(f"{name}: {replay.partition('  ')[2]}; {timing.partition('  ')[2]}")


@pytest.mark.rotated(together=True)
def test_recorded_actions_are_no_constants(exports: dict[str, Path]) -> None:
    for name, folder in exports.items():
        policy = Policy.load(folder)
        assert policy._replay is not None
        from etude_runtime.contract import read_arrays

        actions = read_arrays(policy._replay, "replay")["actions"]
        assert len(np.unique(actions)) > 1, name
        assert policy.document["check"]["largest_difference"] <= 1e-5
    assert float(np.abs(actions).max()) > 1.0  # Pendulum's torques, and not a policy's numbers
    assert np.issubdtype(Policy.load(exports["cartpole"]).last_action.dtype, np.int64)


def flat(walk: WalkConfig | None = None) -> MujocoEnv:
    return (walk or WalkConfig()).build(1)


@pytest.mark.rotated(together=True)
def test_terms_lead_to_the_same_actions_as_observations(exports: dict[str, Path]) -> None:
    by_terms, by_vectors = (Policy.load(exports["walk-go1"]) for _ in range(2))
    env = flat()
    seen = env.reset(Key(1))
    terms = env.task.observations["state"]
    assert isinstance(terms, dict)
    for _ in range(30):
        raw = {name: Observation.of(term).term(env.view)[0] for name, term in terms.items()}
        raw = {name: np.asarray(value, np.float64) for name, value in raw.items()}
        np.testing.assert_array_equal(raw["action"], by_terms.last_action)
        action = by_terms.act(raw)
        expected = by_vectors.act_on_vectors({"state": seen["state"][0]})
        np.testing.assert_array_equal(action, expected)
        seen = env.step(action[None]).obs


@pytest.mark.rotated(together=True)
def test_joint_targets_are_those_of_the_task(exports: dict[str, Path]) -> None:
    joints = JointTargets(Policy.load(exports["walk-go1"]).document)
    env, rng = flat(), np.random.default_rng(0)
    env.reset(Key(2))
    command = env.ability(mj.VelocityCommand)
    assert command is not None
    assert joints.trot is not None
    gait = next(part for part in env.parts if hasattr(part, "reference"))
    for step in range(25):
        command.hold((0.0, 0.0, 0.0) if step < 5 else (0.4, 0.2, -0.3))
        asked = command.command[0]
        np.testing.assert_allclose(joints.trot.phase(step, asked), gait.phase(env)[0], atol=1e-12)
        action = rng.uniform(-0.2, 0.2, 12)
        expected = joints.targets(action, step, asked)
        assert not env.step(action[None]).final_envs.size
        np.testing.assert_allclose(env.simulation.bind("ctrl")[0], expected, atol=1e-12)


def test_history_clip_scale_and_delay_are_those_of_training() -> None:
    """What the runtime puts together is what the environment observes, also after a reset."""
    from toys_export import contract_of, hanging

    env = MujocoEnv(hanging(), 1)
    observation = contract_of(env)
    reader = Reader(observation)
    reader.rng = np.random.default_rng(0)  # delays, which are the same in every episode here
    seen = env.reset(Key(0))["state"]
    reader.reset()
    group = Group.of(env.task.observations["state"])
    for step in range(25):
        raw = [Observation.of(term).term(env.view)[0] for term in group.terms.values()]
        got = reader.read([np.atleast_1d(value).astype(np.float64) for value in raw])
        np.testing.assert_allclose(got, seen[0], rtol=0, atol=1e-6)
        result = env.step(np.full((1, 1), np.sin(step)))
        seen = result.obs["state"]
        if result.final_envs.size:
            reader.reset()
    assert env.episode[0] == 2


def with_(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda terms: {**terms, **changes}


def without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda terms: {name: x for name, x in terms.items() if name != key}


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (without("gravity"), "The term 'gravity' is missing"),
    "extra": (with_(sonar=np.zeros(1)), "There is no term 'sonar'"),
    "misnamed": (
        lambda t: {("gyros" if k == "gyro" else k): v for k, v in t.items()},
        "The term 'gyro' is missing",
    ),
    "reordered": (
        lambda t: {"gravity": t["gravity"], **t},
        "The term 'gravity' is given where 'gyro' belongs",
    ),
    "too short": (with_(joints=np.zeros(11)), "The term 'joints' must have the shape (12,)"),
    "too long": (with_(joints=np.zeros(13)), "and has (13,)"),
    "batched": (with_(joints=np.zeros((1, 12))), "and has (1, 12)"),
    "scalar": (with_(gyro=0.0), "The term 'gyro' must have the shape (3,), and has ()"),
    "integers": (with_(gyro=np.zeros(3, np.int64)), "must be float32 or float64, and is int64"),
    "half": (with_(gyro=np.zeros(3, np.float16)), "must be float32 or float64, and is float16"),
    "text": (with_(gyro="fast"), "The term 'gyro' must be float32 or float64"),
    "none": (with_(gyro=None), "The term 'gyro' must be float32 or float64, and is object"),
    "nan": (with_(speeds=np.full(12, np.nan)), "The term 'speeds' is nan at place 0"),
    "infinite": (
        with_(command=np.array([0.0, np.inf, 0.0])),
        "The term 'command' is inf at place 1",
    ),
    "no dictionary": (lambda t: np.zeros(50), "act takes a dictionary of terms"),
}


@pytest.mark.rotated(together=True)
def test_wrong_inputs_are_refused_by_name(exports: dict[str, Path]) -> None:
    policy = Policy.load(exports["walk-go1"])
    terms = {term.key: np.zeros(term.size) for term in policy.contract.terms}
    policy.act(terms)
    assert len(WRONG) >= 10
    for name, (change, sentence) in WRONG.items():
        with pytest.raises(ContractError) as error:
            policy.act(change(terms))
        assert sentence in str(error.value), name
        assert "\n" not in str(error.value), name
    for vectors in ({}, {"state": np.zeros(49)}, {"state": np.zeros(50), "critic": np.zeros(3)}):
        with pytest.raises(ContractError, match=r"observation '(state|critic)'"):
            policy.act_on_vectors(vectors)
    joints = policy.document["action"]["joints"]
    policy.check_joints(joints)
    with pytest.raises(ContractError, match="Joint 0 is 'FL_hip_joint' where"):
        policy.check_joints([*joints[3:6], *joints[:3], *joints[6:]])
    with pytest.raises(ContractError, match="joint 'RL_calf_joint' is missing"):
        policy.check_joints(joints[:-1])
    with pytest.raises(ContractError, match="no joint 'tail'"):
        policy.check_joints([*joints, "tail"])


@pytest.mark.rotated(together=True)
def test_a_changed_byte_is_found_in_every_file(copied: Path) -> None:
    for path in sorted(copied.iterdir()):
        data = path.read_bytes()
        for place in (0, len(data) // 2, len(data) - 3):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(ContractError, match=re.escape(path.name)):
                Policy.load(copied)
        path.unlink()
        with pytest.raises(ContractError, match=re.escape(path.name)):
            Policy.load(copied)
        path.write_bytes(data)
    Policy.load(copied)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A contract that a stranger wrote, into both places."""
    import hashlib

    document = json.loads((folder / "policy.json").read_text())
    files = document.pop("files")
    change(document)
    model = onnx.load(folder / "policy.onnx", load_external_data=False)
    model.metadata_props[0].value = json.dumps(document)
    data = model.SerializeToString()
    (folder / "policy.onnx").write_bytes(data)
    files["policy.onnx"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "policy.json").write_text(json.dumps({**document, "files": files}))


@pytest.mark.rotated(together=True)
@pytest.mark.parametrize(
    ("keys", "value", "sentence"),
    [
        (("format",), 2, "format 2"),
        (("observations", "state", "size"), 10**12, "where 1 to"),
        (("observations", "state", "size"), 51, "do not add up"),
        (("observations", "state", "history"), 10**9, "where 1 to"),
        (("observations", "state", "terms", 0, "history"), True, "True"),
        (("observations", "state", "terms", 0, "scale"), [1.0, 2.0], "does not fit"),
        (("observations", "state", "terms", 0, "delay"), [3, 1], "impossible delay"),
        (("observations", "state", "terms", 1, "key"), "gyro", "two of one name"),
        (("output", "size"), 11, "other inputs or outputs"),
        (("output", "dtype"), "object", "unknown action"),
        (("recurrent",), [{"input": "h", "output": "n", "shape": [4]}], "other inputs or outputs"),
        (("observations",), [], "no contract|not a contract"),
    ],
)
def test_a_strangers_contract_is_refused(
    keys: tuple[Any, ...], value: Any, sentence: str, copied: Path
) -> None:
    def change(document: dict[str, Any]) -> None:
        *path, last = keys
        for key in path:
            document = document[key]
        document[last] = value

    rewrite(copied, change)
    with pytest.raises(ContractError, match=sentence):
        Policy.load(copied)


@pytest.mark.rotated(together=True)
def test_weights_in_another_file_are_refused(copied: Path, tmp_path: Path) -> None:
    """An ONNX file may name other files to read; nothing outside of the export is."""
    (tmp_path / "secret").write_bytes(b"\0" * 10**5)
    model = onnx.load(copied / "policy.onnx")
    weight = next(x for x in model.graph.initializer if len(x.dims) == 2)
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "../secret"
    (copied / "policy.onnx").write_bytes(model.SerializeToString())
    rewrite(copied, lambda document: None)
    with pytest.raises(ContractError, match=r"policy\.onnx has data in other files"):
        Policy.load(copied)


def other_kinds() -> list[BasePolicy]:
    """Policies of the kinds that `exports` leaves out, small ones."""
    memory, chunks, pictures = (made(n) for n in ("reach-memory", "chunks", "seek-pictures"))
    gru = memory.policy.model_copy(update={"kind": "gru", "units": 8})
    flow = chunks.policy.model_copy(update={"kind": "flow", "flow_steps": 1, "ensemble": None})
    resnet = pictures.policy.encoder.model_copy(update={"kind": "resnet18"})
    sees = pictures.policy.model_copy(update={"encoder": resnet})
    found = [
        make_policy(config, recipe.task.make(1).spec, Key(0))
        for config, recipe in ((gru, memory), (flow, chunks), (sees, pictures))
    ]
    box = made("pendulum").task.make(1).spec
    norm = {"hidden": (8,), "layer_norm": "all"}
    smooth = PolicyConfig(kind="deterministic", activation="silu", **norm)
    squash = PolicyConfig(kind="mlp", activation="relu", squash=True, std="state", **norm)
    found += [make_policy(config, box, Key(0)) for config in (smooth, squash)]
    choices = dataclasses.replace(box, action=ActionSpec("multi_discrete", sizes=(2, 3)))
    return [*found, make_policy(PolicyConfig(hidden=(8,)), choices, Key(0))]


@pytest.mark.rotated(together=True)
def test_the_allowed_operators_are_exactly_those_of_exports(exports: dict[str, Path]) -> None:
    models = [onnx.load(folder / "policy.onnx") for folder in exports.values()]
    models += [exporting._to_onnx(policy.eval()) for policy in other_kinds()]
    used: dict[str, set[str]] = {}
    for model in models:
        onnx_files.check(model.SerializeToString())
        for node in model.graph.node:
            used.setdefault(node.op_type, set()).update(a.name for a in node.attribute)
    assert used == onnx_files.OPERATORS


def test_both_packages_have_the_same_check() -> None:
    copy = ROOT / "runtime/src/etude_runtime/onnx_files.py"
    assert copy.read_bytes() == Path(onnx_files.__file__).read_bytes()


@pytest.mark.rotated(together=True)
def test_a_network_of_other_operators_is_not_exported() -> None:
    policy = trained(made("cartpole"))
    policy.actor.forward = lambda x: torch.sin(x)[..., :2]
    with pytest.raises(UsageError, match="uses the operator 'Sin', which no export has"):
        exporting._to_onnx(policy)


def four_gigabytes(model: Any) -> None:
    """Nothing but allowed operators, and a result that no robot has memory for."""
    size = onnx.numpy_helper.from_array(np.array([1 << 30], np.int64), "size")
    model.graph.initializer.append(size)
    nodes = [
        onnx.helper.make_node("ConstantOfShape", ["size"], ["zeros"]),
        onnx.helper.make_node("Softmax", ["zeros"], ["shares"], axis=-1),
    ]
    model.graph.node.extend(nodes)
    model.graph.output.append(onnx.helper.make_tensor_value_info("shares", 1, [1 << 30]))


def endless(model: Any) -> None:
    make = onnx.helper.make_node
    body = onnx.helper.make_graph([make("Identity", ["c"], ["d"])], "b", [], [])
    model.graph.node.append(make("Loop", ["", "", "state"], ["last"], body=body))


@pytest.mark.rotated(together=True)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [(four_gigabytes, "cannot be run|takes more than"), (endless, "the operator 'Loop'")],
)
def test_a_hostile_network_never_runs_in_the_process_of_a_robot(
    change: Callable[[Any], None], sentence: str, copied: Path
) -> None:
    model = onnx.load(copied / "policy.onnx")
    change(model)
    (copied / "policy.onnx").write_bytes(model.SerializeToString())
    rewrite(copied, lambda document: None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ContractError, match=sentence):
        Policy.load(copied)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


@pytest.mark.rotated(together=True)
def test_exports_hold_no_code_and_no_paths(exports: dict[str, Path]) -> None:
    root = str(Path(exporting.__file__).parents[3]).encode()
    for folder in exports.values():
        names = {path.name for path in folder.iterdir()}
        assert {"policy.onnx", "policy.json"} <= names
        assert names <= {"policy.onnx", "policy.json", "replay.safetensors", "scene.xml"}
        for path in folder.iterdir():
            data = path.read_bytes()
            assert root not in data
            assert b"def forward" not in data
            assert b".py" not in data
        model = onnx.load(folder / "policy.onnx")
        assert not model.functions
        assert {node.domain for node in model.graph.node} == {""}
        assert [entry.key for entry in model.metadata_props] == ["etude"]
        critics = [x.name for x in model.graph.initializer if "critic" in x.name]
        assert critics == []


@pytest.mark.rotated(together=True)
def test_the_contract_says_what_a_robot_needs(exports: dict[str, Path]) -> None:
    walk = Policy.load(exports["walk-go1"]).document
    terms = {term["name"]: term for term in walk["observations"]["state"]["terms"]}
    assert (terms["gyro"]["unit"], terms["gyro"]["scale"]) == ("rad/s", 0.25)
    assert (terms["speeds"]["offset"], terms["speeds"]["size"]) == (18, 12)
    assert all(term["unit"] and term["about"] for term in terms.values())
    assert walk["control"]["period"] == pytest.approx(0.02)
    assert walk["action"]["scale"] == 0.5
    assert [joint["name"] for joint in walk["joints"]] == walk["action"]["joints"]
    assert walk["joints"][1]["default"] == pytest.approx(0.9)
    assert walk["actuators"][2]["stiffness"] == 35.0
    assert walk["actuators"][2]["force_range"] == [-35.55, 35.55]
    assert walk["trot"]["frequency"] == 2.0
    assert walk["versions"]["torch"]
    assert walk["run"]["fingerprint"]
    assert "critic" not in walk["observations"]
    plain = Policy.load(exports["cartpole"]).document
    assert [term["key"] for term in plain["observations"]["state"]["terms"]] == ["state"]
    assert plain["output"]["choices"] == [2]
    memory = Policy.load(exports["reach-memory"]).document
    assert [each["input"] for each in memory["recurrent"]] == ["recurrent_h", "recurrent_c"]


@pytest.mark.rotated(together=True)
def test_the_runtime_describes_replays_and_times(
    exports: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_runtime([str(exports["walk-go1"]), "--steps", "200"]) == 0
    out = capsys.readouterr().out
    assert "reads   gyro               3  rad/s: a gyroscope in the base (x 0.25)" in out
    assert "replay  1,000 recorded steps, largest difference" in out
    assert "median" in out
    assert "99.9 %" in out
    assert run_runtime([str(tmp_path)]) == 1
    assert "policy.json is missing" in capsys.readouterr().err


@pytest.mark.rotated(together=True)
def test_a_policy_that_differs_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recipe = made("cartpole")
    policy = trained(recipe)
    monkeypatch.setattr(exporting.fresh, "load", lambda path, trust: policy)
    monkeypatch.setattr(exporting.fresh, "step_of", lambda path: 7)
    monkeypatch.setattr(exporting, "TOLERANCE", -1.0)
    with pytest.raises(EtudeError, match="nothing was written"):
        exporting.export(recipe, tmp_path, tmp_path / "to", {}, steps=10)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(UsageError, match="name a new folder"):
        exporting.export(recipe, tmp_path, tmp_path / "there", {}, steps=10)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, match=r"pip install 'etude\[export\]'"):
        exporting.export(recipe, tmp_path, tmp_path / "to", {}, steps=10)


@pytest.mark.rotated(together=True)
def test_images_are_read_as_they_are(exports: dict[str, Path]) -> None:
    policy = Policy.load(exports["seek-pictures"])
    assert policy.document["observations"]["image"]["image"] == [64, 64, 3]
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    action = policy.act({"image": picture})
    assert np.array_equal(policy.act_on_vectors({"image": picture}), action)
    assert not np.allclose(policy.act({"image": 255 - picture}), action)
    for wrong, said in (
        (picture / 255.0, "must be an image of uint8, and is float64"),
        (picture[:32], r"must have the shape \(64, 64, 3\), and has \(32, 64, 3\)"),
        (picture.transpose(2, 0, 1), "must have the shape"),
    ):
        with pytest.raises(ContractError, match=said):
            policy.act({"image": wrong})


@pytest.mark.slow
def test_the_command_exports_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import etude
    from toys import tiny_reach

    run = etude.train(tiny_reach(2), tmp_path / "run")
    monkeypatch.setattr(exporting.export, "__defaults__", (False, 20))
    capsys.readouterr()
    step = max(run.policies())
    inside = run.path / "checkpoints" / f"{step:012}"
    assert main(["export", str(inside), "--to", str(tmp_path / "to")]) == 0
    assert "20 recorded steps, largest difference from torch" in capsys.readouterr().out
    document = Policy.load(tmp_path / "to").document
    assert document["run"]["fingerprint"] == run.fingerprint()
    assert document["run"]["policy_step"] == step
    assert main(["export", str(run.path), "--to", str(tmp_path / "to")]) == 2
    assert "is there already" in capsys.readouterr().err


def test_help_says_what_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "New folder for policy.onnx and policy.json. Must be given." in capsys.readouterr().out


def test_the_trot_stands_still_where_it_is_told_to() -> None:
    said = {"frequency": 2.0, "fold": 0.2, "swing": 0.5, "hips": [[0.1, 0.1]] * 4}
    trot = Trot({**said, "offsets": [0.0] * 4}, 0.02)
    assert not trot.reference(3, (0.0, 0.0, 0.0)).any()
    assert not trot.phase(3, (0.0, 0.0, 0.0)).any()
    assert trot.reference(3, (0.5, 0.0, 0.0)).any()
