"""Export of a policy to ONNX, with a contract that describes its observations and actions.

A folder of an export has `policy.onnx` (normaliser, network, clipping and scaling of actions),
`policy.json` (the contract, which the ONNX file has in its metadata as well), `replay.safetensors`
(recorded steps to test a copy with) and, for tasks on MuJoCo, `scene.xml`. None of them is code.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from etude.api import Run
from etude.core.contracts import ActionSpec, Array, ArraySpec, Described, ability
from etude.core.errors import EtudeError, UsageError
from etude.core.keys import Key
from etude.core.output import waiting
from etude.core.trees import Tree, digest
from etude.evaluate import fresh
from etude.models.networks import CLIP, Normaliser, is_image
from etude.models.policies import BasePolicy
from etude.planning.loading import chosen_path
from etude.planning.recipe import Recipe
from etude.rollout.group import Inference, restart
from etude.runs import onnx_files, tensors
from etude.runs.files import move_folder
from etude.runs.onnx_files import METADATA, OPSET
from etude.share.onnx_child import onnx_actions

FORMAT = 1
"""Format version of `policy.json`; the runtime refuses others."""
STEPS = 1000
"""Recorded steps with which every export is tested."""
TOLERANCE = 1e-5
"""Largest allowed difference of actions between torch and ONNX, in their unit."""
ONNX, CONTRACT, REPLAY, SCENE = "policy.onnx", "policy.json", "replay.safetensors", "scene.xml"
MOTION = "motion.safetensors"
_MOST_BYTES = 64 << 20
"""Most bytes of an observation's recorded steps: of large images fewer steps are recorded."""
_PACKAGES = ("etude", "torch", "onnx", "onnxruntime", "numpy", "mujoco")


@dataclass(frozen=True)
class Replay:
    """Consecutive steps of one environment."""

    observations: dict[str, Array]
    """{name: [steps, n] float32}, of images [steps, height, width, channels] uint8."""
    starts: Array
    """[steps] bool: whether an episode starts with the step."""
    actions: Array
    """[steps, n]: actions of the torch policy, in the units of the environment."""


@dataclass(frozen=True)
class Exported:
    """An export on disk."""

    path: Path
    contract: Tree = field(repr=False)
    sizes: dict[str, int]
    """{file: bytes}"""


class ExactNormaliser(nn.Module):
    """A normaliser in float64, whose product and sum are rounded once.

    torch rounds shift + x * scale once (a fused multiply-add), ONNX twice. Where a column hardly
    moves, scale and shift are in the thousands and cancel: the second rounding is then 1e-4.
    """

    shift: torch.Tensor
    scale: torch.Tensor

    def __init__(self, normaliser: Normaliser) -> None:
        super().__init__()
        self.register_buffer("shift", normaliser.shift.double())
        self.register_buffer("scale", normaliser.scale.double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., size] float32, raw."""
        exact = x.double() * self.scale + self.shift
        return exact.float().clamp(-CLIP, CLIP)


class ActingPolicy(nn.Module):
    """The most likely action of a policy as a function of tensors.

    Inputs are what the actor reads and then its recurrent state, in the order of `inputs`; outputs
    are the action in the environment's units and the next recurrent state.
    """

    def __init__(self, policy: BasePolicy) -> None:
        super().__init__()
        self.policy = policy = deepcopy(policy)
        for name, normaliser in policy.normalisers.items():
            has_seen = getattr(normaliser, "has_seen", True)  # else it leaves what it reads alone
            if isinstance(normaliser, Normaliser) and has_seen:
                policy.normalisers[name] = ExactNormaliser(normaliser)
        self._reads, self._states = tuple(policy.actor_observations), tuple(policy.state_specs)
        self.inputs = (*self._reads, *(f"recurrent_{name}" for name in self._states))
        self.outputs = ("action", *(f"next_recurrent_{name}" for name in self._states))

    def examples(self) -> tuple[torch.Tensor, ...]:
        """Inputs of one environment, all zero."""
        policy = self.policy
        specs = [*policy.actor_observations.values(), *policy.state_specs.values()]
        return tuple(torch.from_numpy(np.zeros((1, *spec.shape), spec.dtype)) for spec in specs)

    def zeros(self) -> dict[str, Array]:
        """The recurrent state at an episode's start, {input: [1, ...]}."""
        reads = len(self._reads)
        examples = zip(self.inputs[reads:], self.examples()[reads:], strict=True)
        return {name: x.numpy() for name, x in examples}

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        reads = len(self._reads)
        obs = dict(zip(self._reads, inputs[:reads], strict=True))
        state = dict(zip(self._states, inputs[reads:], strict=True))
        answer = self.policy.act(obs, state, None)
        action = _in_env_units(self.policy.action, answer.actions)
        return action, *(answer.state[name] for name in self._states)


def _in_env_units(spec: ActionSpec, actions: torch.Tensor) -> torch.Tensor:
    """Apply `ActionSpec.to_env` to [1, n] in torch."""
    if spec.kind != "box":
        return actions
    unit = actions.clamp(-1.0, 1.0)
    if {*spec.low} == {-1.0} and {*spec.high} == {1.0}:
        return unit
    low, high = torch.tensor(spec.low), torch.tensor(spec.high)
    scaled = (high + low) * 0.5 + unit * ((high - low) * 0.5)
    return torch.minimum(torch.maximum(scaled, low), high)


def export_run(
    run: Run, folder: str | Path, checkpoint: str | int = "best", trust: bool = False
) -> Exported:
    """Write a policy of a run as ONNX with its contract into a new folder, like `etude export`.

    checkpoint: "best", "latest" or a step. trust: code that the policy names may run.
    """
    path = chosen_path(run.path, str(checkpoint))
    return export(run.recipe, path, Path(folder), fingerprint_of(run), trust)


def fingerprint_of(run: Run) -> Tree:
    """The fingerprint of a run; {} if its files were not kept."""
    try:
        return dict(run.fingerprint())
    except EtudeError:
        return {}


def export(
    recipe: Recipe,
    path: Path,
    to: Path,
    fingerprint: Tree,
    trust: bool = False,
    steps: int = STEPS,
) -> Exported:
    """Write the policy at `path`, of a run of this recipe, into the new folder `to`.

    fingerprint: what identifies the run. steps: how many are recorded to compare torch and ONNX.
    """
    _check_installed()
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"{to} is there already: name a new folder, or remove this one.")
    policy = fresh.load(path, trust).eval()
    for name, spec in policy.actor_observations.items():
        if not is_image(spec) and (len(spec.shape) != 1 or spec.dtype != "float32"):
            raise UsageError(
                f"The policy reads '{name}', {spec.dtype} of shape {spec.shape}: policies that "
                "read anything but images and vectors of float32 cannot be exported yet."
            )
        steps = min(steps, max(1, _MOST_BYTES // spec.num_bytes))
    with waiting(f"recording {steps:,} steps"):
        replay, described = _record(recipe, policy, path, steps)
    scene, motion = described.pop("scene", ""), described.pop("arrays", {})
    contract = _contract(recipe, policy, path, described, fingerprint)
    with waiting("writing ONNX"):
        model = _to_onnx(policy)
    with waiting(f"comparing {steps:,} steps"):
        difference = largest_difference(model.SerializeToString(), policy, replay)
    if not difference <= TOLERANCE:
        raise EtudeError(
            f"ONNX and torch differ by {difference:.2g} in {steps:,} recorded steps, and "
            f"{TOLERANCE:g} is allowed: nothing was written."
        )
    contract["check"] = {"steps": steps, "largest_difference": difference}
    entry = model.metadata_props.add()
    entry.key, entry.value = METADATA, json.dumps(contract, sort_keys=True, allow_nan=False)
    arrays = {f"observations/{name}": x for name, x in replay.observations.items()}
    arrays |= {"starts": replay.starts, "actions": replay.actions}
    files = {
        ONNX: model.SerializeToString(deterministic=True),
        REPLAY: _safetensors(arrays),
        **({SCENE: scene.encode()} if scene else {}),
        **({MOTION: _safetensors(motion)} if motion else {}),
    }
    contract["files"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    files[CONTRACT] = (json.dumps(contract, indent=1, allow_nan=False) + "\n").encode()
    _write(to, files)
    return Exported(to, contract, {name: len(data) for name, data in files.items()})


def _safetensors(arrays: dict[str, Array]) -> bytes:
    return b"".join(bytes(c) for c in tensors.chunks(arrays, tensors.layout(arrays)))


def _check_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"An export needs the package {error.name}: pip install 'etude[export]'."
        ) from error


def _record(recipe: Recipe, policy: BasePolicy, path: Path, steps: int) -> tuple[Replay, Tree]:
    """(recorded steps of the policy in its task, description of the task)."""
    env = recipe.task.for_evaluation().make(recipe.task.num_agents)
    try:
        fresh.check_fits(policy, env.spec, path)
        obs = env.reset(Key(recipe.seed).child("export"))
        infer, state = Inference(policy), policy.initial_state(env.num_envs)
        names = tuple(policy.actor_observations)
        starts: Array = np.zeros(steps, np.bool_)
        seen: dict[str, list[Array]] = {name: [] for name in names}
        starts[0] = True
        for step in range(steps):
            for name in names:
                seen[name].append(obs[name][0].copy())
            actions, _, state = infer(obs, state, None)
            result = env.step(policy.action.to_env(actions))
            obs = result.obs
            restart(state, policy, result.final_envs)
            if step + 1 < steps:
                starts[step + 1] = 0 in result.final_envs
        source = ability(env, Described)
        described = {} if source is None else source.describe()
    finally:
        env.close()
    observations = {
        name: np.stack(rows).astype(policy.actor_observations[name].dtype)
        for name, rows in seen.items()
    }
    return Replay(observations, starts, torch_actions(policy, observations, starts)), described


def torch_actions(
    policy: BasePolicy,
    observations: dict[str, Array],
    starts: Array,
    check: Callable[[], None] = lambda: None,
) -> Array:
    """Actions [steps, n] of the policy in one environment, with its recurrent state.

    check: called before every step; may raise to end it.
    """
    infer, state, found = Inference(policy), policy.initial_state(1), []
    for step, begins in enumerate(starts.tolist()):
        check()
        if begins:
            state = policy.initial_state(1)
        rows = {name: x[step : step + 1] for name, x in observations.items()}
        actions, _, state = infer(rows, state, None)
        found.append(policy.action.to_env(actions).reshape(-1))
    return np.stack(found)


def _contract(
    recipe: Recipe, policy: BasePolicy, path: Path, described: Tree, fingerprint: Tree
) -> Tree:
    """The content of `policy.json`, without the entries on the written files."""
    action = policy.action
    said = described.pop("observations", {})
    observations = {
        name: _observation(name, spec, said.get(name))
        for name, spec in policy.actor_observations.items()
    }
    names = [term["name"] for each in observations.values() for term in each["terms"]]
    for name, each in observations.items():
        for term in each["terms"]:  # by its own name, unless two observations have one so named
            twice = names.count(term["name"]) > 1
            term["key"] = f"{name}/{term['name']}" if twice else term["name"]
    return {
        "format": FORMAT,
        "name": recipe.name,
        "observations": observations,
        "output": {
            "space": action.kind,
            "size": action.array.shape[0],
            "dtype": action.array.dtype,
            "low": list(action.low),
            "high": list(action.high),
            "choices": list(action.sizes),
        },
        "recurrent": [
            {
                "name": name,
                "shape": list(spec.shape),
                "input": f"recurrent_{name}",
                "output": f"next_recurrent_{name}",
            }
            for name, spec in policy.state_specs.items()
        ],
        **({"sentences": policy.sentences} if policy.sentences else {}),
        **described,
        "run": {
            "fingerprint": fingerprint,
            "policy_step": fresh.step_of(path),
            "policy_kind": policy.config.kind,
            "policy_sha256": digest({k: v.numpy() for k, v in policy.state_dict().items()}),
            "seed": recipe.seed,
            "env": _without_folders(recipe.task.model_dump(mode="json")),
        },
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
    }


def _without_folders(value: Any) -> Any:
    """Options in which absolute paths, which name the machine, are the names of their files."""
    if isinstance(value, dict):
        return {name: _without_folders(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _observation(name: str, spec: ArraySpec, said: Tree | None) -> Tree:
    """An observation as a list of terms; one term for images and if the task has no description."""
    size = math.prod(spec.shape)
    if said is None or is_image(spec):
        plain = {"unit": "", "about": "", "clip": None, "scale": 1.0, "history": 1}
        term = {"name": name, "offset": 0, "size": size, **plain, "delay": [0, 0], "noise": 0.0}
        said = {"delay": [0, 0], "history": 1, "terms": [term]}
    block = sum(term["size"] * term["history"] for term in said["terms"])
    if block * said["history"] != size:
        raise EtudeError(
            f"The task describes '{name}' as {block * said['history']} numbers, and the policy "
            f"reads {size}: correct its `describe`."
        )
    return {"size": size, **({"image": list(spec.shape)} if is_image(spec) else {}), **said}


def _to_onnx(policy: BasePolicy) -> Any:
    """The policy as an ONNX model, without paths of this machine."""
    import onnx

    acting = ActingPolicy(policy)
    for parameter in acting.parameters():
        parameter.requires_grad_(False)
    try:
        with _quiet():
            program = torch.onnx.export(
                acting,
                acting.examples(),
                input_names=list(acting.inputs),
                output_names=list(acting.outputs),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # user-defined networks may do anything that torch cannot trace
        cause = error.__cause__ or error
        first = str(cause).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"torch cannot write this policy as ONNX: {type(cause).__name__}: {first}."
        ) from error
    assert program is not None
    model = program.model_proto
    graph = model.graph
    # Nodes carry source lines and paths of the machine that they were traced on.
    for each in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    for each in (graph, model):
        each.ClearField("metadata_props")
        each.ClearField("doc_string")
    graph.ClearField("value_info")
    graph.name, model.producer_name = "policy", "etude"
    onnx.checker.check_model(model, full_check=True)
    try:
        onnx_files.check(model.SerializeToString())
    except onnx_files.Refused as error:
        raise UsageError(
            f"The ONNX file of this policy {error}: the runtime refuses it, so build its network "
            f"of the operators {', '.join(onnx_files.OPERATORS)}."
        ) from error
    return model


@contextmanager
def _quiet() -> Any:
    """Suppress the output of the exporter of torch."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    nowhere = io.StringIO()
    try:
        with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def largest_difference(model: bytes, policy: BasePolicy, replay: Replay) -> float:
    """The largest difference of an action between torch and ONNX over recorded steps."""
    acting = ActingPolicy(policy)
    found = onnx_actions(model, replay.observations, replay.starts, acting.zeros(), acting.outputs)
    return distance(found, replay)


def distance(actions: Array, replay: Replay) -> float:
    """The largest difference of an action [steps, n] from the replay's; NaN where one is NaN."""
    return float(np.abs(actions.astype(np.float64) - replay.actions).max())


def _write(to: Path, files: dict[str, bytes]) -> None:
    """Write files into a folder that appears when it is complete."""
    to.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{to.name}-", dir=to.parent))
    try:
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        scratch.chmod(0o755)
        move_folder(scratch, to)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
