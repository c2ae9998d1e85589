"""Every reader of files that may come from a stranger, as a function of bytes; for tests and the
gate that tries a million of them.

A reader takes the bytes of its files, joined by `CUT`, puts them in place with every hash made
right, and reads. It may refuse with an `EtudeError`; anything else is a finding.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import sys
import zipfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from etude.core import user_code
from etude.core.contracts import ActionSpec, ArraySpec, EnvSpec
from etude.core.errors import EtudeError
from etude.core.keys import Key
from etude.core.limited import FrameWriter
from etude.data.formats import opening
from etude.data.motion import clips, motions
from etude.data.motion import files as motion_files
from etude.data.store.episodes import EpisodeStore
from etude.data.store.geometry import StoreGeometry
from etude.evaluate.acting import LoadedPolicy
from etude.models.policies import PolicyConfig, make_policy
from etude.models.rebuilding import policy_from_contract
from etude.models.reward_networks import (
    CONTRACT_KIND,
    RewardNetworkConfig,
    make_reward_network,
    reward_network_from_contract,
)
from etude.planning import recipes
from etude.runs import checkpoint, documents, files, tensors
from etude.runs.documents import SEAL, encode_sealed

CUT = b"\n--8<--\n"
CORPUS = Path(__file__).parent / "corpus"
"""Inputs that found something, by reader."""

Read = Callable[[bytes], str | None]
"""What is said of a refused input; None of one that was taken."""


class Reader(NamedTuple):
    """A reader, valid inputs to begin with, and how large an input may grow."""

    read: Read
    seeds: list[bytes]
    max_bytes: int = 1 << 14
    native: bool = False
    """Whether it reads with a library that may die, in a process of its own."""


def _pieces(data: bytes, count: int) -> list[bytes]:
    found = data.split(CUT)
    return found[:count] + [b""] * (count - len(found))


# Policies and checkpoints.

SPEC = EnvSpec(
    {"state": ArraySpec((3,)), "image": ArraySpec((8, 8, 1), "uint8")},
    ActionSpec("box", low=(-2.0, 0.0), high=(1.0, 1.0)),
    10,
)
CHOICES = EnvSpec(SPEC.observations, ActionSpec("discrete", sizes=(3,)), 10)
KINDS = ("mlp", "lstm", "gru", "squashed", "deterministic")


def _policies() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(arrays, contract) of small policies of every kind, and of a reward."""
    made = []
    for kind in KINDS:
        config = PolicyConfig(kind=kind, hidden=(4,), units=3)
        policy = make_policy(config, CHOICES if kind == "gru" else SPEC, Key(0))
        made.append((dict(policy.state_dict()), policy.contract()))
    config = RewardNetworkConfig(reads=(), hidden=(4,), encoder={"channels": (2, 2), "features": 3})
    network = make_reward_network(config, SPEC.observations, SPEC.action, Key(0))
    return [*made, (dict(network.state_dict()), network.contract())]


def contract_reader(scratch: Path) -> Reader:
    """A policy's or reward's contract, beside the arrays of one of its kind."""
    policies = _policies()

    def read(data: bytes) -> str | None:
        try:
            contract = documents.decode_json(data)
        except documents.Malformed as error:
            return str(error)
        said = contract.get("policy")
        kind = said.get("kind") if isinstance(said, dict) else None
        try:
            if contract.get("kind") == CONTRACT_KIND:
                reward_network_from_contract(contract, policies[-1][0])
                return None
            arrays, _ = policies[KINDS.index(kind) if kind in KINDS else 0]
            policy = policy_from_contract(contract, arrays)
        except EtudeError as error:
            return _sentence(error)
        seen = policy.actor_observations
        LoadedPolicy(policy).act({n: np.zeros(s.shape, s.dtype) for n, s in seen.items()})
        return None

    return Reader(read, [documents.encode_json(contract) for _, contract in policies], 4096)


def checkpoint_reader(scratch: Path) -> Reader:
    """Both halves of a checkpoint, their manifests made right again."""
    folder = scratch / "checkpoint"
    arrays, contract = _policies()[0]
    training = {
        "clock": {"timesteps": 3, "rates": [0.5, float("inf")]},
        "collector": {"rows": np.arange(4.0), "mask": np.array([True, False]), "none": {}},
    }
    path = checkpoint.save(folder, 1, (arrays, contract), training)
    names = [f"{part}/{name}" for part in checkpoint.DOCUMENTS for name in _named(part)]
    seed = CUT.join((path / name).read_bytes() for name in names)

    def read(data: bytes) -> str | None:
        pieces = _pieces(data, len(names))
        with suppress(documents.Malformed):
            tensors.read(io.BytesIO(pieces[0]), len(pieces[0]))
        for name, piece in zip(names, pieces, strict=True):
            (path / name).write_bytes(piece)
        _reseal(path, dict(zip(names, pieces, strict=True)))
        try:
            found = checkpoint.load_training(path)
            policy_from_contract(found[1], found[0])
        except EtudeError as error:
            return _sentence(error)
        return None

    return Reader(read, [seed], 8192)


def _named(part: str) -> tuple[str, str]:
    return checkpoint.ARRAYS, checkpoint.DOCUMENTS[part]


def _reseal(path: Path, pieces: dict[str, bytes]) -> None:
    pins = None
    for part in checkpoint.DOCUMENTS:
        listed = {
            name: files.Written(len(data), hashlib.sha256(data).hexdigest())
            for name in _named(part)
            for data in [pieces[f"{part}/{name}"]]
        }
        manifest = checkpoint._manifest(part, 1, listed, pins)
        (path / part / checkpoint.MANIFEST).write_bytes(manifest)
        pins = hashlib.sha256(manifest).hexdigest()


# Recipes and clips.


def recipe_reader(scratch: Path) -> Reader:
    """A recipe.yaml."""
    path = scratch / "recipe.yaml"
    least = {"name": "x", "clock": {"total_timesteps": 512}}
    envs: list[dict[str, Any]] = [
        {"env": {"kind": "reach"}, "seed": 3},
        {"env": {"kind": "task", "task": "a.py:B", "options": {"c": 1}}, "policy": {"hidden": [4]}},
        {"env": {"kind": "gym", "id": "a:B-v0"}, "algorithm": {"kind": "sac"}},
        {"rewards": {"kind": "rrd"}, "evaluation": {"every": "2 epochs"}, "start_from": "runs/a"},
        {"env": {"kind": "track"}, "rewards": {"kind": "amp"}, "logs": {"wandb": True}},
    ]
    seeds = [json.dumps({**least, **env}).encode() for env in envs]
    seeds += [b"name: &a !!str x\nclock: {<<: {epochs: 1}}\nenv: {kind: reach}\n# *a\n"]

    def read(data: bytes) -> str | None:
        path.write_bytes(data)
        try:
            recipes.dump(recipes.load(path))
        except EtudeError as error:
            return _sentence(error)
        finally:
            user_code._doubted.clear()
        return None

    return Reader(read, seeds, 1024)


def clip_reader(scratch: Path) -> Reader:
    """A clip of motion."""
    path = scratch / "clip.json"
    frame = [0.1, 0.0, 1.0, 0.0, *[1.0, 0.0, 0.0, 0.0] * 4, 0.1, *[1.0, 0.0, 0.0, 0.0], 0.2]
    frame += [1.0, 0.0, 0.0, 0.0] * 2
    frame += [0.3, 1.0, 0.0, 0.0, 0.0, 0.3, 1.0, 0.0, 0.0, 0.0]
    frame = frame[: clips.NUM_NUMBERS]
    seeds = [json.dumps({"Loop": "wrap", "Frames": [frame] * 3}).encode()]
    try:
        published = next(iter(clips.find().values()))
        document = json.loads(published.read_text())
        document["Frames"] = document["Frames"][:3]
        seeds += [json.dumps({**document, "Loop": loop}).encode() for loop in ("wrap", "none")]
    except EtudeError:
        pass

    def read(data: bytes) -> str | None:
        path.write_bytes(data)
        try:
            clip = motions.close(clips.read(path))
        except EtudeError as error:
            return _sentence(error)
        motions.sample(clip, np.linspace(0.0, clip.seconds, 5))
        return None

    return Reader(read, seeds, 4096)


def motion_reader(scratch: Path) -> Reader:
    """A motion: the arrays of an .npz, each with the checksum made right, or a .csv."""
    times = np.arange(3) / 50
    poses = np.tile([0.0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0.2], (3, 1))
    motion = motions.Motion("made", times, poses, True, {"ball": 4, "hinge": 1})
    for suffix in (".npz", ".csv"):
        motion_files.write(motion, scratch / f"seed{suffix}")
    with zipfile.ZipFile(scratch / "seed.npz") as archive:
        names = archive.namelist()
        arrays = CUT.join(archive.read(name) for name in names)

    def read(data: bytes) -> str | None:
        path = scratch / "motion.csv"
        if CUT in data:
            path = scratch / "motion.npz"
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in zip(names, _pieces(data, len(names)), strict=True):
                    archive.writestr(name, content)
        else:
            path.write_bytes(data)
        try:
            found = motions.close(motion_files.read(path))
        except EtudeError as error:
            return _sentence(error)
        motions.sample(found, np.linspace(0.0, found.seconds, 5))
        return None

    return Reader(read, [arrays, (scratch / "seed.csv").read_bytes()], 8192)


# Datasets.


def dataset_reader(scratch: Path) -> Reader:
    """An episode store that was sealed: its documents and its blocks, hashes made right."""
    path = scratch / "store"
    specs = {
        "obs/state": ArraySpec((2,)),
        "actions": ArraySpec((1,)),
        "rewards": ArraySpec((), "float32"),
        "terminated": ArraySpec((), "bool"),
        "truncated": ArraySpec((), "bool"),
    }
    store = EpisodeStore.create(path, StoreGeometry(specs, 1, 8, block_steps=4), files.Disk())
    for steps in (3, 2):
        store.append_episode(
            {"state": np.ones((steps + 1, 2), np.float32)},
            np.zeros((steps, 1), np.float32),
            np.ones(steps, np.float32),
            True,
        )
    store.seal().close()
    names = sorted(file.name for file in path.iterdir())
    seed = CUT.join((path / name).read_bytes() for name in names)

    def read(data: bytes) -> str | None:
        pieces = dict(zip(names, _pieces(data, len(names)), strict=True))
        with suppress(ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
            seal = json.loads(pieces["sealed.json"])
            seal.pop(SEAL, None)
            seal["labels"] = hashlib.sha256(pieces["labels.json"]).hexdigest()
            pieces["sealed.json"] = encode_sealed(seal)
        for name, piece in pieces.items():
            (path / name).write_bytes(piece)
        try:
            opened = EpisodeStore.open(path)
            if opened.num_episodes:
                opened.episode(0)
                opened.sample_transitions(np.random.default_rng(0), 3)
            opened.close()
            opened.check_blocks()
        except EtudeError as error:
            return _sentence(error)
        return None

    return Reader(read, [seed], 8192)


def hdf5_reader(scratch: Path) -> Reader:
    """robomimic's and Minari's HDF5, as the process that opens them does."""
    path = scratch / "data.hdf5"
    seeds = []
    for flavour in ("robomimic", "minari"):
        with h5py.File(path, "w", libver="latest") as file:
            (_robomimic if flavour == "robomimic" else _minari)(file)
        seeds.append(path.read_bytes())
    listener = _Listener(os.open(os.devnull, os.O_WRONLY))
    options = {"obs": (), "mask": None, "success_reward": None, "assume_success": False}
    order = {
        "path": str(path),
        "job": "read",
        "seconds": 10.0,
        "skip": 0,
        "options": options,
        "memory": 1 << 29,
    }

    def read(data: bytes) -> str | None:
        path.write_bytes(data)
        listener.error = None
        limit = resource.getrlimit(resource.RLIMIT_CPU)
        try:
            opening.run(order, listener)
        finally:  # The limit is for a process that opens one file; this one goes on.
            resource.setrlimit(resource.RLIMIT_CPU, limit)
        return listener.error

    return Reader(read, seeds, 1 << 14, native=True)


class _Listener(FrameWriter):
    """Notes the one error that the parent would be told of."""

    error: str | None = None

    def send(self, kind: str, data: Iterable[memoryview | bytes] = (), **content: Any) -> None:
        super().send(kind, data, **content)
        if kind == "error":
            self.error = str(content["what"])


def _robomimic(file: h5py.File) -> None:
    data = file.create_group("data")
    data.attrs["env_args"] = '{"env_name": "Lift"}'
    demo = data.create_group("demo_0")
    demo.attrs["num_samples"] = 3
    demo["actions"] = np.zeros((3, 2), np.float32)
    demo["rewards"] = np.zeros(3, np.float32)
    demo["dones"] = np.array([0, 0, 1])
    demo.create_dataset("obs/state", data=np.zeros((3, 4)), chunks=(2, 4), compression="gzip")
    demo["next_obs/state"] = np.zeros((3, 4), np.float32)
    file["mask/train"] = np.array([b"demo_0"])


def _minari(file: h5py.File) -> None:
    episode = file.create_group("episode_0")
    episode.attrs["total_steps"] = 3
    episode["observations"] = np.zeros((4, 2), np.float32)
    episode["actions"] = np.zeros((3, 1), np.float32)
    episode["rewards"] = np.zeros(3)
    episode["terminations"] = np.array([False, False, True])
    episode["truncations"] = np.array([False, False, False])


READERS: dict[str, Callable[[Path], Reader]] = {
    "checkpoint": checkpoint_reader,
    "contract": contract_reader,
    "recipe": recipe_reader,
    "dataset": dataset_reader,
    "hdf5": hdf5_reader,
    "clip": clip_reader,
    "motion": motion_reader,
}


def _sentence(error: EtudeError) -> str:
    """What is refused is refused in one sentence of bounded length."""
    text = str(error)
    if "\n" in text or len(text) > 3000:
        raise AssertionError(f"no sentence: {text[:200]!r}") from error
    return text


# What no reader may do.

_FORBIDDEN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "pty.spawn")
_FORBIDDEN += ("socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Notes what happens in this process that reading should never lead to."""

    def __init__(self, scratch: Path) -> None:
        self._inside = os.path.realpath(scratch) + os.sep
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.active:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.200}")
        elif event == "import" and self._is_foreign(str(arguments[0])):
            self.seen.append(f"import of {arguments[0]}")
        elif event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and not self._is_inside(path):
                self.seen.append(f"open of {path!r:.200} to write")
        elif event in _CHANGES and not self._is_inside(arguments[0]):
            self.seen.append(f"{event} {arguments!r:.200}")

    def _is_inside(self, path: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return True
        return os.path.realpath(os.fsdecode(path)).startswith(self._inside)

    def _is_foreign(self, module: str) -> bool:
        package = module.partition(".")[0]
        return package not in sys.stdlib_module_names and package not in sys.modules


# Changes that keep an input's structure.

_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 64, 2**31, 2**63, 10**30, -1.5, 1e308, float("nan"), "", "x",
    "x" * 300, "a.b", "../../x", "/etc/passwd", "os:system", "a.py:B", "1", "all", [], {}, [[]],
    [0], [1] * 70, {"a": 1}, {"kind": "x"}, "\ud800", "é", "a/b", "auto", "float64", "reach",
]  # fmt: skip


def change(data: bytes, chance: random.Random) -> bytes | None:
    """The input with one node of one of its JSON documents changed; None where it has none."""
    pieces = data.split(CUT)
    for index in chance.sample(range(len(pieces)), len(pieces)):
        piece = pieces[index]
        head = int.from_bytes(piece[:8], "little")
        is_tensors = piece[8:9] == b"{" and head <= len(piece) - 8
        text = piece[8 : 8 + head] if is_tensors else piece
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if not isinstance(document, dict | list):
            continue
        _edit(document, chance)
        new = json.dumps(document).encode()
        if is_tensors:
            new = len(new).to_bytes(8, "little") + new + piece[8 + head :]
        return CUT.join([*pieces[:index], new, *pieces[index + 1 :]])
    return None


def _edit(document: Any, chance: random.Random) -> None:
    nodes, waiting = [], [document]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list) and node:
            nodes.append(node)
            waiting += node.values() if isinstance(node, dict) else node
    if not nodes:
        return
    for _ in range(chance.choice((1, 1, 2, 4))):
        node, other = chance.choice(nodes), chance.choice(nodes)
        value = chance.choice(_VALUES)
        if chance.random() < 0.3:
            found = list(other.values()) if isinstance(other, dict) else other
            value = json.loads(json.dumps(chance.choice(found))) if found else value
        way = chance.random()
        if isinstance(node, list):
            place = chance.randrange(len(node) + 1)
            if way < 0.3 and node:
                node.pop(place - 1)
            elif way < 0.6 or place == len(node):
                node.insert(place, value)
            else:
                node[place] = value
        else:
            name = chance.choice(list(node)) if node else "a"
            if way < 0.2:
                node.pop(name, None)
            elif way < 0.3:
                node[str(value)[:40]] = node.pop(name, 1)
            else:
                node[name] = value


if __name__ == "__main__":
    READERS[sys.argv[1]](Path(sys.argv[3])).read(Path(sys.argv[2]).read_bytes())
