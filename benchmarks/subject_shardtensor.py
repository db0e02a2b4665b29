"""PhysicsNeMo's ShardTensor as a contestant: an image cut along its height over gloo, by a maintained library.

ShardTensor is made for GPUs. On a CPU it supports stacks of convolutions and ReLU on even parts (it computes batch norm
on gathered data, and rejects 3 x 3 max pooling of stride 2), so it takes part only on such networks.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np
import physicsnemo.domain_parallel as parallel
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.placement_types import Shard

from benchmarks.problems import PROBLEMS, has_relu
from benchmarks.worker import launched_rank
from halograd import layers as hl

__all__ = ["ShardTensorSubject"]


class ShardTensorSubject:
    """Network cut along the height, one part per rank, by ShardTensor. Collective over the launched ranks.

    The layout is NCHW, which is the fastest for this library. The loss is that of the rank's own part; the library sums
    its gradients.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        torch.set_num_interop_threads(1)
        rank, self.ranks = launched_rank(), spec["ranks"]
        # It reads these from the environment.
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{spec['pipes']}/{spec['name']}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=self.ranks)
        parallel.register_custom_ops()  # the package does this only with CUDA
        self.mesh, self.rank = init_device_mesh("cpu", (self.ranks,)), rank
        problem = PROBLEMS[spec["problem"]]
        self.network = problem.make()
        weights = problem.weights(self.network)
        self.params = {name: _packed(array).requires_grad_() for name, array in weights.items()}
        self.inputs = {name: self._part(array) for name, array in problem.data(self.network).items()}
        self.elements = problem.batch * math.prod(self.network.outputs["prediction"].shape)
        self.optimizer = torch.optim.SGD(list(self.params.values()), lr=problem.rate, fused=True)
        threads = f"{self.ranks} x {torch.get_num_threads()} threads"
        self.about = f"ShardTensor on torch {torch.__version__}, NCHW, gloo, {threads}"

    def _part(self, array: np.ndarray) -> torch.Tensor:
        rows, rest = divmod(array.shape[1], self.ranks)
        if rest:
            raise ValueError(f"expected rows in {self.ranks} even parts, got {array.shape[1]}")
        local = _packed(array[:, self.rank * rows : (self.rank + 1) * rows])
        shapes = {0: (local.shape,) * self.ranks}
        return parallel.ShardTensor.from_local(local, self.mesh, (Shard(2),), sharding_shapes=shapes)

    def _loss(self) -> torch.Tensor:
        """Return this rank's part of the mean loss."""
        values, network = dict(self.inputs), self.network
        for name, node in network.layers.items():
            inputs = [values[network.names[n]] for n in node.inputs]
            if isinstance(node.layer, hl.Conv):
                values[name] = self._conv(name, node, inputs[0])
            elif isinstance(node.layer, hl.BinaryCrossEntropyWithLogits):
                logits, target = (x.to_local() for x in inputs)
                total = F.binary_cross_entropy_with_logits(logits, target, reduction="sum")
                values[name] = total / self.elements
            else:
                raise ValueError(f"{name}: expected a convolution or the loss, got {node.layer.kind}")
        return values[network.names[network.outputs["loss"]]]

    def _conv(self, name: str, node: hl.Node, x: torch.Tensor) -> torch.Tensor:
        windows = node.layer.windows(node.inputs[0].shape)
        stride, padding = tuple(w.stride for w in windows), tuple(w.pad_lo for w in windows)
        y = F.conv2d(x, self.params[f"{name}/w"], self.params.get(f"{name}/b"), stride, padding)
        return F.relu(y) if has_relu(node.layer) else y

    def step(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss()
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing, because every step is complete when it returns."""

    def close(self) -> None:
        dist.destroy_process_group()


def _packed(array: np.ndarray) -> torch.Tensor:
    """Return ``(N, H, W, C)`` as packed ``(N, C, H, W)``; other arrays unchanged."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.permute(0, 3, 1, 2).contiguous() if tensor.ndim == 4 else tensor.clone()
