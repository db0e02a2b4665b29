"""Group, instance and layer normalisation by kernels that take all samples at once, on a device. ::

    forward    sums of x, x^2 -> totals of groups -> all-reduce -> mean, var -> y
    backward   sums of dy, dy * xhat -> gradients of gamma, beta
               totals of groups, with gamma -> all-reduce -> means -> dx

Every arrow is one launch or two, whatever the number of samples, and the host waits for none of them.

Variances come of sums in float64 without looking whether they cancel: for float32 and 16 bits, where that costs
digits if ``mean^2 / var`` exceeds 5e8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from halograd.layers.batch_norm import lower_affine
from halograd.layers.sample_group import sample_groups

if TYPE_CHECKING:
    from halograd.program.context import Context

__all__ = ["lower_fused"]


def lower_fused(context: Context, groups: int, eps: float, relu: bool) -> Callable[[], None]:
    """The backend's norms of samples around sums over the ranks that share them; not in float64."""
    boxes, shape = context.output.layout.boxes, context.output.layout.shape
    samples, channels = context.box.shape[0], shape[-1]
    x = context.gather(0, context.clipped(0))
    views = {name: context.keep((samples, channels), context.wide, "statistics") for name in ("mean", "var")}
    forms = {"sums": (samples, 2, channels), "means": (samples, 2, channels), "totals": (samples, 2, groups)}
    views |= {name: context.keep(form, "float64", "statistics") for name, form in forms.items()}
    views |= {"x": x.view, "y": context.y, **lower_affine(context, channels)}
    sizes = [16 * groups * int(n) for n in boxes.extents[0]]
    total = context.sum(sample_groups(boxes), views["totals"], "statistics", sizes)
    kernel = context.kernel(partial(_Kernel, groups / math.prod(shape[1:]), eps, relu), **views)
    forward = tuple(views)
    x.start()
    x.finish()
    context.run(kernel, "statistics", uses=forward)
    context.add_up(total)
    context.run(kernel, "normalize", uses=forward, timing=context.timing("forward"))

    def backward() -> None:
        dx = context.gradient(0) if context.needs_gradient(0) else context.scratch(context.box.shape)
        kernel.add(dy=context.dy, dx=dx)
        kernel.add(**{f"d{key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward_sums", timing=context.timing("backward_data"))
        context.add_up(total)
        context.run(kernel, "backward_data")

    return backward


class _Kernel:
    """The backend's kernels in four parts."""

    def __init__(self, scale: float, eps: float, relu: bool, environment: Any, **arrays: Any) -> None:
        get = arrays.get
        cuda, x, totals, gamma = environment.kernels.cuda, arrays["x"], arrays["totals"], arrays["gamma"]
        self.totals, self.grads = totals, [arrays[k] for k in ("dbeta", "dgamma") if k in arrays]
        self.parts: dict[str, list[Any]] = {k: [] for k in ("statistics", "normalize", "sums", "data")}
        self.empty = not x.size
        if self.empty:
            return
        mean, var, sums, means = (arrays[k] for k in ("mean", "var", "sums", "means"))
        both = (gamma, arrays["beta"], mean, var, sums, means, eps, relu)
        self.norm = cuda.sample_norm(x, arrays["y"], get("dy"), get("dx"), *both, premultiplied=True)
        self.parts["statistics"] = [self.norm.statistics, cuda.group_totals(sums, totals, None, scale)]
        self.parts["normalize"] = [cuda.group_moments(totals, mean, var), self.norm.forward]
        if get("dx") is not None:
            own = [cuda.sum_samples(sums, *self.grads)] if self.grads else []
            self.parts["sums"] = [self.norm.backward_sums, *own, cuda.group_totals(sums, totals, gamma, scale)]
            self.parts["data"] = [cuda.group_spread(totals, means), self.norm.backward_data]

    def statistics(self) -> None:
        self._run("statistics")

    def normalize(self) -> None:
        self._run("normalize")

    def backward_sums(self) -> None:
        self._run("sums")
        if self.empty:
            for array in self.grads:
                array.fill(0)

    def backward_data(self) -> None:
        self._run("data")

    def _run(self, part: str) -> None:
        if self.empty:
            self.totals.fill(0)
        for call in self.parts[part]:
            call()

    def close(self) -> None:
        """Free the backend's kernels."""
        for item in (*(c for part in self.parts.values() for c in part), *([] if self.empty else [self.norm])):
            if hasattr(item, "close"):
                item.close()
