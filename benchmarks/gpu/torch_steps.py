"""torch on a device, controlled by :mod:`benchmarks.gpu.contest`: a program that builds networks and times their steps.

``python -m benchmarks.gpu.torch_steps DEVICE``; commands and replies are JSON lines::

    {"do": "build", "name": "eager", "subject": {...},
     "precision": "bf16" | "tf32", "compiled": false,
     "graph": false}                                    -> {"loss": ..., "bytes": ...}
    {"do": "attention", "name": ..., "subject": {...}}  -> {}
    {"do": "steps", "name": "eager", "count": 10}       -> {"seconds": ...} of a step

The settings are channels-last, ``cudnn.benchmark``, fused SGD with momentum, and gradients set to None. ``bf16`` is
autocast, whose parameters stay float32; ``compiled`` compiles the forward pass, and with it the backward pass;
``graph`` captures a whole step as one CUDA graph. (`torch.compile` itself leaves graphs out where a network writes
running statistics.)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.subjects import MOMENTUM, RATE, Subject
from benchmarks.subject_torch import TorchNetwork

__all__ = ["Attention", "Steps", "serve"]


class _Timed:
    """Steps on a device, and their time."""

    device: str

    def step(self) -> Any:
        """Run one step."""
        raise NotImplementedError

    def seconds(self, count: int) -> float:
        """Return the mean time of consecutive steps, without waits between them [s]."""
        if self.device == "cpu":
            begin = time.perf_counter()
            for _ in range(count):
                self.step()
            return (time.perf_counter() - begin) / count
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(count):
            self.step()
        second.record()
        second.synchronize()
        return first.elapsed_time(second) * 1e-3 / count


class Attention(_Timed):
    """Attention in bfloat16, forward and backward, of arrays ``(samples, *extents, heads * width)``.

    Windows are divided, and biases gathered, as in torchvision's Swin.
    """

    def __init__(self, device: str, subject: dict[str, Any]) -> None:
        self.device, self._window, self._heads = device, subject["window"], subject["heads"]
        shape = (subject["samples"], *subject["extents"], self._heads * subject["width"])
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self._inputs = [torch.randn(shape, requires_grad=True, **options) for _ in range(3)]
        self._gradient, self._table = torch.randn(shape, **options), None
        if self._window is not None:
            at = torch.arange(self._window, device=device)
            positions = torch.cartesian_prod(at, at)
            distance = positions[:, None] - positions[None] + self._window - 1
            self._entries = distance[..., 0] * (2 * self._window - 1) + distance[..., 1]
            entries = (2 * self._window - 1) ** 2
            self._table = torch.randn((self._heads, entries), device=device, requires_grad=True)

    def step(self) -> Any:
        for array in (*self._inputs, self._table):
            if array is not None:
                array.grad = None
        mask = None if self._table is None else self._table[:, self._entries][None].to(torch.bfloat16)
        q, k, v = (self._divided(x) for x in self._inputs)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        self._whole(y).backward(self._gradient)
        return y

    def _divided(self, x: Any) -> Any:
        """Return ``(windows, heads, positions, width)``."""
        n, *extents, _ = x.shape
        if self._window is None:
            return x.reshape(n, -1, self._heads, x.shape[-1] // self._heads).transpose(1, 2)
        w, (a, b) = self._window, (m // self._window for m in extents)
        split = x.reshape(n, a, w, b, w, self._heads, -1).permute(0, 1, 3, 5, 2, 4, 6)
        return split.reshape(n * a * b, self._heads, w * w, -1)

    def _whole(self, y: Any) -> Any:
        shape = self._gradient.shape
        if self._window is None:
            return y.transpose(1, 2).reshape(shape)
        w, (a, b) = self._window, (m // self._window for m in shape[1:-1])
        split = y.reshape(shape[0], a, b, self._heads, w, w, -1).permute(0, 1, 4, 2, 5, 3, 6)
        return split.reshape(shape)


class Steps(_Timed):
    """Training steps of one network on a device."""

    def __init__(self, subject: Subject, precision: str, compiled: bool, device: str) -> None:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        description = subject.network()
        weights, data = subject.weights(description), subject.data(description)
        network = TorchNetwork(description, weights, data, device)
        self.device, self._low = device, precision == "bf16"
        self._forward = torch.compile(network.loss) if compiled else network.loss
        self._replay: Callable[[], None] | None = None
        self._optimizer = torch.optim.SGD(list(network.params.values()), lr=RATE, momentum=MOMENTUM, fused=True)

    def step(self) -> torch.Tensor | None:
        if self._replay is None:
            return self._step()
        self._replay()
        return None

    def capture(self) -> None:
        """Capture a step as a graph, which later steps replay.

        Three steps on another stream precede it, as torch's documentation recommends.
        """
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._replay = graph.replay

    def _step(self) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self._low):
            loss = self._forward()
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class _Server:
    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: dict[str, _Timed] = {}

    def reply(self, command: dict[str, Any]) -> dict[str, Any]:
        """Execute a command and return the reply."""
        if command["do"] == "build":
            return self._build(command)
        if command["do"] == "attention":
            self.steps[command["name"]] = Attention(self.device, command["subject"])
            return {}
        return {"seconds": self.steps[command["name"]].seconds(command["count"])}

    def _build(self, command: dict[str, Any]) -> dict[str, Any]:
        gpu = self.device == "cuda"
        before = torch.cuda.memory_allocated() if gpu else 0
        steps = Steps(Subject(**command["subject"]), command["precision"], command["compiled"], self.device)
        loss = float(steps._step())
        steps.step()  # now cudnn.benchmark has measured, and everything is compiled
        if command["graph"] and gpu:
            steps.capture()
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        steps.step()
        nbytes = torch.cuda.max_memory_allocated() - before if gpu else 0
        self.steps[command["name"]] = steps
        return {"loss": loss, "bytes": nbytes}


def serve(device: str) -> None:
    """Execute commands until the input ends; other output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server(device)
    for line in sys.stdin:
        try:
            reply = server.reply(json.loads(line))
        except Exception as error:
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    serve(sys.argv[1])
