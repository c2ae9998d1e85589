"""A small standard computation: where its bits are the same, so are those of a run.

The name of a CPU and the versions of libraries say little about the last bit; this asks for it. It
goes through what a run computes with: matrix products of several sizes, functions such as exp and
tanh in numpy, in torch and in the C library, and some steps of physics with contacts.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import mujoco
import numpy as np
import torch
from torch.nn import functional

from etude.core import trees
from etude.core.contracts import Array
from etude.core.trees import Tree

_LAYERS = ((1, 17, 64), (16, 64, 64), (64, 25, 256), (256, 96, 7))
"""Rows, inputs and outputs: each size may have kernels of its own."""
_STEPS = 60
_SCENE = """
<mujoco>
  <option timestep="0.004"/>
  <worldbody>
    <geom type="plane" size="2 2 .1"/>
    <body pos="0 0 .2" euler="20 35 10">
      <freejoint/>
      <geom type="box" size=".1 .06 .04"/>
      <body pos=".12 0 0">
        <joint axis="0 1 0" damping=".1"/>
        <geom type="capsule" size=".03 .1" pos=".1 0 0" euler="0 90 0"/>
        <body pos=".24 0 0"><joint type="ball"/><geom type="ellipsoid" size=".05 .04 .03"/></body>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@cache
def digest() -> str:
    """SHA-256 of the results on this machine, with the libraries and variables of this process.

    It takes one torch thread, however many the caller has: machines are compared, not settings.
    """
    # The count of torch's threads belongs to the thread that sets it.
    with ThreadPoolExecutor(1) as alone:
        return alone.submit(lambda: trees.digest(_results())).result()


def _results() -> Tree:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return {"numpy": _numpy(), "torch": _torch(), "libc": _libc(), "physics": _physics()}


def _numbers(*shape: int) -> Array:
    """Numbers between -1 and 1, the same on any machine: of each one product is rounded."""
    count = np.arange(1, math.prod(shape) + 1, dtype=np.uint64)
    mixed = count * np.uint64(6364136223846793005) >> np.uint64(40)
    return ((mixed.astype(np.float64) * 2.0**-23 - 1.0) * 0.7071067811865476).reshape(shape)


def _tensor(*shape: int) -> torch.Tensor:
    """The same as float32, in memory of torch's own: kernels may go by where an array begins."""
    return torch.from_numpy(_numbers(*shape)).to(torch.float32)


def _numpy() -> Tree:
    x = _numbers(1000)
    functions = (np.exp, np.tanh, np.sin, np.cos, np.arctan, np.cbrt)
    found: Tree = {f.__name__: f(3.0 * x) for f in functions}
    found |= {f"{f.__name__}32": f(np.float32(3.0) * x.astype(np.float32)) for f in functions}
    found["log"], found["power"] = np.log(x + 2.0), np.power(x + 2.0, 1.7)
    found["sum"] = np.stack([x.sum(), (x * x).mean(), x.std(), x @ x])
    for rows, inputs, outputs in _LAYERS:
        found[f"product{rows}"] = _numbers(rows, inputs) @ _numbers(inputs, outputs)
    return found


def _torch() -> Tree:
    x = _tensor(1000)
    functions = (torch.exp, torch.tanh, torch.sin, torch.erf, torch.sigmoid, torch.log1p)
    found: Tree = {f.__name__: f(0.9 * x) for f in functions}
    found["softmax"], found["elu"] = x.view(10, 100).softmax(1), functional.elu(x)
    found["sum"] = torch.stack([x.sum(), x.square().mean(), x.std(), x.norm()])
    found["convolution"] = functional.conv2d(x[:960].view(2, 3, 16, 10), x[:216].view(8, 3, 3, 3))
    for rows, inputs, outputs in _LAYERS:
        rows_in, weights = _tensor(rows, inputs), _tensor(outputs, inputs)
        found[f"layer{rows}"] = functional.linear(rows_in, weights, weights[:, 0])
        found[f"gradient{rows}"] = found[f"layer{rows}"].T @ rows_in
    return found


def _libc() -> Tree:
    functions = (math.exp, math.sin, math.cos, math.tan, math.atan, math.tanh)
    values = _numbers(200).tolist()
    return {f.__name__: np.array([f(2.0 * value) for value in values]) for f in functions}


def _physics() -> Tree:
    try:
        model = mujoco.MjModel.from_xml_string(_SCENE)
    except ValueError as error:  # of a scene that is right: only memory can be missing
        raise MemoryError("MuJoCo could not compile a small scene") from error
    data = mujoco.MjData(model)
    data.qvel[:] = _numbers(model.nv)
    for _ in range(_STEPS):
        mujoco.mj_step(model, data)
    return {"qpos": data.qpos.copy(), "qvel": data.qvel.copy(), "touching": data.ncon}
