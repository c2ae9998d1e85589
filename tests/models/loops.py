"""A recurrent layer written out one step at a time, and weights that are nowhere special."""

from __future__ import annotations

import torch
from torch import nn

from etude.models.recurrent import Core


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(dtype)


def jolt(module: nn.Module) -> None:
    """Move every parameter away from the special values it starts with."""
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p += 0.3 * normal(*p.shape, seed=100 + i, dtype=p.dtype)


def loop(
    core: Core, x: torch.Tensor, state: dict[str, torch.Tensor], starts: torch.Tensor
) -> torch.Tensor:
    """What `unroll` must give, written from the equations one step at a time."""
    w, v, b, d = core.weight_ih, core.weight_hh, core.bias_ih, core.bias_hh
    h, c = state["h"], state.get("c", state["h"])
    outs = []
    for t in range(x.shape[1]):
        keep = (~starts[:, t : t + 1]).to(x.dtype)
        h, c = h * keep, c * keep
        given, own = x[:, t] @ w.T + b, h @ v.T + d
        if "c" in state:
            i, f, g, o = (given + own).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (r, z, new), (r_own, z_own, new_own) = given.chunk(3, dim=1), own.chunk(3, dim=1)
            candidate = (new + (r + r_own).sigmoid() * new_own).tanh()
            z = (z + z_own).sigmoid()
            h = (1.0 - z) * candidate + z * h
        outs.append(h)
    return torch.stack(outs, dim=1)
