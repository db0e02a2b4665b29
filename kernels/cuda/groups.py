"""Small vectors of norms on their way between sums and means, so that no step of them needs the host."""

from __future__ import annotations

from typing import Any

from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import Launch, is_float, items_grid, sequence
from halograd.kernels.cuda.sources import Program, dtype_name
from halograd.kernels.kernel import Kernel, idle

__all__ = ["group_moments", "group_spread", "group_totals", "sum_samples"]


def _launch(device: Device, name: str, items: int, data: Any, **members: Any) -> Kernel:
    """`data`: an array of the dtype that per-channel vectors have if they are not float32."""
    if items == 0:
        return idle()
    program = Program("norm", (dtype_name(data) if data is not None else "float32",))
    return sequence(name, Launch(device, program, name, items_grid(device, items), **members))


def group_totals(device: Device, sums: Any, totals: Any, gamma: Any, scale: float) -> Kernel:
    """``totals[n, q, g] = scale * sum over channels c of group g of sums[n, q, c] * gamma[c]``, in float64."""
    batch, _, channels = sums.shape
    given = {"sums": sums, "totals": totals, "gamma": gamma, "gamma_float": is_float(gamma), "scale": scale}
    given.update(batch=batch, channels=channels, groups=totals.shape[-1])
    return _launch(device, "group_totals", totals.size, gamma, **given)


def group_moments(device: Device, totals: Any, mean: Any, var: Any, scale: float) -> Kernel:
    """mean and biased variance ``(N, C)`` from ``scale * totals = [E x, E x^2]``, float64 ``(N, 2, G)``."""
    batch, channels = mean.shape
    given = {"totals": totals, "mean": mean, "var": var, "mean_float": is_float(mean), "var_float": is_float(var)}
    given.update(batch=batch, channels=channels, groups=totals.shape[-1], scale=scale)
    return _launch(device, "group_moments", mean.size, mean, **given)


def group_spread(device: Device, totals: Any, means: Any) -> Kernel:
    """``means[n, q, c] = totals[n, q, group of c]``, in float64."""
    batch, _, channels = means.shape
    given = {"totals": totals, "means": means, "batch": batch, "channels": channels, "groups": totals.shape[-1]}
    return _launch(device, "group_spread", means.size, None, **given)


def sum_samples(device: Device, sums: Any, first: Any, second: Any) -> Kernel:
    """``first = sum over samples of sums[:, 0]``, ``second`` of ``sums[:, 1]``; ``(C,)``."""
    batch, _, channels = sums.shape
    given = {"sums": sums, "first": first, "second": second, "batch": batch, "channels": channels}
    given.update(first_float=is_float(first), second_float=is_float(second), groups=1)
    return _launch(device, "sum_samples", channels, first, **given)
