"""A policy that acts on named measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from etude_runtime.contract import (
    CONTRACT,
    MOTION,
    ONNX,
    REPLAY,
    Array,
    Contract,
    ContractError,
    Observation,
    decode,
    load_contract,
    read_arrays,
)
from etude_runtime.joints import Motion
from etude_runtime.measuring import Reader
from etude_runtime.onnx_files import Refused, check
from etude_runtime.trial import attempt

TOLERANCE = 1e-5


class Policy:
    """One robot's policy: `act` once in every control period, `reset` where an episode begins.

    It keeps what the policy has to remember: history of measurements and recurrent state.
    """

    def __init__(
        self,
        contract: Contract,
        model: bytes,
        replay: bytes | None = None,
        threads: int = 1,
        motion: bytes | None = None,
    ) -> None:
        self.contract = contract
        self._replay, self._motion = replay, motion
        _check_contract(model, contract)
        self._session = _session(model, threads)
        _check_model(self._session, contract)
        self._outputs = ["action", *(each.output for each in contract.recurrent)]
        self._readers = [Reader(each) for each in contract.observations]
        self._order = [term.key for term in contract.terms]
        self.disturb(None)
        self.reset()

    @classmethod
    def load(cls, folder: str | Path, threads: int = 1, trial: bool = True) -> Policy:
        """The policy in a folder that `etude export` wrote; refuses files that were changed.

        trial: run it once in a subprocess with limits on memory and time first. Leave it out only
        for exports of your own, where a robot has to start quickly.
        """
        contract, files = load_contract(Path(folder))
        _check_contract(files[ONNX], contract)
        if trial and (wrong := attempt(files[ONNX])):
            raise ContractError(f"{Path(folder) / ONNX} {wrong}: do not use this export.")
        return cls(contract, files[ONNX], files.get(REPLAY), threads, files.get(MOTION))

    @property
    def document(self) -> dict[str, Any]:
        """All of `policy.json`."""
        return self.contract.document

    def motion(self, number: int = 0) -> Motion:
        """A motion that a tracking policy follows; number: in `document["motion"]["names"]`."""
        if self._motion is None:
            raise ContractError(f"This export has no {MOTION}: its policy tracks no motion.")
        return Motion(self.document, read_arrays(self._motion, MOTION), number)

    @property
    def period(self) -> float | None:
        """Seconds of a control step; None where the task did not say."""
        period = self.document.get("control", {}).get("period")
        return None if period is None else float(period)

    @property
    def last_action(self) -> Array:
        """[n]: what `act` gave last, 0 after `reset`; what terms of the last action are."""
        return self._last.copy()

    def reset(self) -> None:
        """An episode begins: nothing was measured or done yet."""
        self._state = {
            each.input: np.zeros((1, *each.shape), np.float32) for each in self.contract.recurrent
        }
        self._last = np.zeros(self.contract.output.size, self.contract.output.dtype)
        for reader in self._readers:
            reader.reset()

    def disturb(self, rng: np.random.Generator | None) -> None:
        """Measure as in training, with its noise and delays drawn from `rng`; None: as given.

        For tests from one simulator to another; on a robot, noise and delays are there already.
        """
        for reader in self._readers:
            reader.rng = rng
            reader.reset()

    def check_joints(self, names: Sequence[str]) -> None:
        """Refuse a robot whose joints are others than the policy's, or in another order."""
        action = self.document.get("action", {})
        wanted = action.get("joints") or [j["name"] for j in self.document.get("joints", [])]
        if list(names) == wanted:
            return
        for name in wanted:
            if name not in names:
                raise ContractError(f"The joint '{name}' is missing: the policy moves {wanted}.")
        for name in names:
            if name not in wanted:
                raise ContractError(f"There is no joint '{name}': the policy moves {wanted}.")
        first = next(i for i, (a, b) in enumerate(zip(names, wanted, strict=True)) if a != b)
        raise ContractError(
            f"Joint {first} is '{names[first]}' where the policy has '{wanted[first]}': put the "
            f"joints in the order {wanted}."
        )

    def act(self, terms: Mapping[str, Any]) -> Array:
        """[n]: the action for {term: measurement}, in the task's units.

        terms: every term of the contract by its key, in the contract's order and unit, before its
        clip and scale; float arrays of the term's size, uint8 [height, width, channels] of an
        image.
        """
        self._check_keys(terms)
        return self._run(
            {reader.observation.name: _read(reader, terms) for reader in self._readers}
        )

    def act_on_vectors(self, observations: Mapping[str, Any]) -> Array:
        """[n]: the action for {observation: [size] float32, or a uint8 image} as the task itself
        gives them.

        Terms are clipped, scaled and joined with their history already. A policy is run by `act`
        or by this from one `reset` to the next, not by both.
        """
        wanted = {each.name: each for each in self.contract.observations}
        for name in (*wanted, *observations):
            if name not in observations or name not in wanted:
                there = "missing" if name in wanted else "not read by this policy"
                raise ContractError(f"The observation '{name}' is {there}: it reads {[*wanted]}.")
        return self._run({name: _whole(each, observations[name]) for name, each in wanted.items()})

    def _run(self, vectors: dict[str, Array]) -> Array:
        inputs = {name: vector[None] for name, vector in vectors.items()}
        action, *state = self._session.run(self._outputs, {**inputs, **self._state})
        self._state = dict(zip(self._state, state, strict=True))
        if not np.isfinite(action).all():
            raise ContractError("The policy's action is not finite: do not apply it, and reset.")
        self._last = action[0]
        return self.last_action

    def _check_keys(self, terms: Mapping[str, Any]) -> None:
        if not isinstance(terms, Mapping):
            raise ContractError(
                f"act takes a dictionary of terms, {{{', '.join(self._order)}}}, not "
                f"{type(terms).__name__}."
            )
        given = list(terms)
        if given == self._order:
            return
        for key in self._order:
            if key not in terms:
                raise ContractError(f"The term '{key}' is missing; the policy reads {self._order}.")
        for key in given:
            if key not in self._order:
                raise ContractError(f"There is no term '{key}'; the policy reads {self._order}.")
        place = next(i for i, (a, b) in enumerate(zip(given, self._order, strict=True)) if a != b)
        raise ContractError(
            f"The term '{given[place]}' is given where '{self._order[place]}' belongs: give the "
            f"terms in the order {self._order}."
        )

    def replay(self) -> tuple[int, float]:
        """(steps, largest difference): the export's recorded steps, acted on here.

        Resets before and after. Refuses where it is more than 1e-5.
        """
        if self._replay is None:
            raise ContractError(f"This export has no {REPLAY}: nothing was recorded.")
        arrays = read_arrays(self._replay, REPLAY)
        largest = 0.0
        try:
            starts, actions = arrays["starts"], arrays["actions"]
            rows = {o.name: arrays[f"observations/{o.name}"] for o in self.contract.observations}
            for step in range(len(starts)):
                if starts[step]:
                    self.reset()
                action = self.act_on_vectors({name: x[step] for name, x in rows.items()})
                away = np.abs(action.astype(np.float64) - actions[step]).max()
                largest = max(largest, float(away))
        except (KeyError, IndexError) as error:
            raise ContractError(f"{REPLAY} was not recorded of this policy.") from error
        self.reset()
        if largest > TOLERANCE:
            raise ContractError(
                f"This machine's actions differ from the recorded ones by {largest:.2g}, and "
                f"{TOLERANCE:g} is allowed: do not run this policy here."
            )
        return len(starts), largest


def _read(reader: Reader, terms: Mapping[str, Any]) -> Array:
    """An observation of its measured terms."""
    observation = reader.observation
    if observation.image is not None:
        key = observation.terms[0].key
        return _pixels(f"term '{key}'", terms[key], observation.image)
    measured = [
        _floats(f"term '{term.key}'", terms[term.key], term.size) for term in observation.terms
    ]
    return reader.read(measured)


def _whole(observation: Observation, value: Any) -> Array:
    """An observation as the task gives it."""
    what = f"observation '{observation.name}'"
    if observation.image is not None:
        return _pixels(what, value, observation.image)
    return _floats(what, value, observation.size).astype(np.float32)


def _pixels(what: str, value: Any, shape: tuple[int, ...]) -> Array:
    """uint8 [height, width, channels]; refuses other types and shapes."""
    array = np.asarray(value)
    if array.dtype != np.uint8:
        raise ContractError(f"The {what} must be an image of uint8, and is {array.dtype}.")
    if array.shape != shape:
        raise ContractError(f"The {what} must have the shape {shape}, and has {array.shape}.")
    return array


def _floats(what: str, value: Any, size: int) -> Array:
    """[size] float64; refuses other types and shapes, and numbers that are not finite."""
    array = np.asarray(value)
    if array.dtype not in (np.float32, np.float64):
        raise ContractError(f"The {what} must be float32 or float64, and is {array.dtype}.")
    if array.shape != (size,):
        raise ContractError(f"The {what} must have the shape ({size},), and has {array.shape}.")
    if not np.isfinite(array).all():
        place = int(np.flatnonzero(~np.isfinite(array))[0])
        raise ContractError(f"The {what} is {array[place]} at place {place}: it must be finite.")
    return array.astype(np.float64)


def _session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many kinds of them
        first = str(error).strip().partition("\n")[0]
        raise ContractError(f"onnxruntime cannot load {ONNX}: {first[:200]}") from error


def _check_contract(model: bytes, contract: Contract) -> None:
    """Refuse a model that no export has, or one that was written with another contract."""
    try:
        text = check(model)
    except Refused as error:
        raise ContractError(f"{ONNX} {error}: it was not loaded.") from error
    inside = decode(text.encode(), f"The contract in {ONNX}")
    if _plain(inside) != _plain(contract.document):
        raise ContractError(
            f"{CONTRACT} is not the contract that {ONNX} was written with: copy the export again."
        )


def _check_model(session: onnxruntime.InferenceSession, contract: Contract) -> None:
    """Refuse a network that has other inputs and outputs than the contract."""
    recurrent = contract.recurrent
    inputs = {
        each.name: ("tensor(float)" if each.image is None else "tensor(uint8)", [1, *each.shape])
        for each in contract.observations
    }
    inputs |= {each.input: ("tensor(float)", [1, *each.shape]) for each in recurrent}
    kind = {"float32": "tensor(float)", "int64": "tensor(int64)"}[contract.output.dtype]
    outputs = {"action": (kind, [1, contract.output.size])}
    outputs |= {each.output: ("tensor(float)", [1, *each.shape]) for each in recurrent}
    for found, wanted in ((session.get_inputs(), inputs), (session.get_outputs(), outputs)):
        if {each.name: (each.type, each.shape) for each in found} != wanted:
            raise ContractError(f"{ONNX} has other inputs or outputs than {CONTRACT} says.")


def _plain(document: dict[str, Any]) -> str:
    """A contract as text, but for the hashes of files, which it cannot hold of itself."""
    return json.dumps({k: v for k, v in document.items() if k != "files"}, sort_keys=True)
