"""torch on a device, controlled by :mod:`benchmarks.gpu.contest`: a program that builds networks and times their steps.

``python -m benchmarks.gpu.torch_steps DEVICE``; commands and replies are JSON lines::

    {"do": "build", "name": "eager", "subject": {...},
     "precision": "bf16" | "tf32", "compiled": null}    -> {"loss": ..., "about": ..., "bytes": ...}
    {"do": "steps", "name": "eager", "count": 10}       -> {"seconds": ...} of a step
    {"do": "free"}                                      -> {}

The settings are channels-last, ``cudnn.benchmark``, fused SGD with momentum, and gradients set to None. ``bf16`` is
autocast, whose parameters stay float32; ``compiled`` is the mode of `torch.compile` of the forward pass, and with it
of the backward pass, or null.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.subjects import MOMENTUM, RATE, Subject
from benchmarks.subject_torch import TorchNetwork

__all__ = ["Steps", "serve"]


class Steps:
    """Training steps of one network on a device."""

    def __init__(self, subject: Subject, precision: str, compiled: str | None, device: str) -> None:
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        description = subject.network()
        weights, data = subject.weights(description), subject.data(description)
        network = TorchNetwork(description, weights, data, device)
        self.device, self._low = device, precision == "bf16"
        self._compiled = compiled
        self._forward = torch.compile(network.loss, mode=compiled) if compiled else network.loss
        self._optimizer = torch.optim.SGD(list(network.params.values()), lr=RATE, momentum=MOMENTUM, fused=True)

    def step(self) -> torch.Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        if self._compiled:
            torch.compiler.cudagraph_mark_step_begin()  # the graphs of the last step may be overwritten
        with torch.autocast(self.device, torch.bfloat16, enabled=self._low):
            loss = self._forward()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

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


class _Server:
    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: dict[str, Steps] = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "build":
            return self._build(command)
        if command["do"] == "free":
            self.steps.clear()
            gc.collect()
            if self.device == "cuda":
                torch._dynamo.reset()
                torch.cuda.empty_cache()
            return {}
        return {"seconds": self.steps[command["name"]].seconds(command["count"])}

    def _build(self, command: dict[str, Any]) -> dict[str, Any]:
        gpu = self.device == "cuda"
        before = torch.cuda.memory_allocated() if gpu else 0
        made = Steps(Subject(**command["subject"]), command["precision"], command["compiled"], self.device)
        loss = float(made.step())
        made.step()  # now cudnn.benchmark has measured, and everything is compiled
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        made.step()
        nbytes = torch.cuda.max_memory_allocated() - before if gpu else 0
        self.steps[command["name"]] = made
        about = f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, channels-last"
        return {"loss": loss, "bytes": nbytes, "about": about}


def serve(device: str) -> None:
    """Execute commands until the input ends; other output goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    server = _Server(device)
    for line in sys.stdin:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}
        print(json.dumps(answer), file=replies)


if __name__ == "__main__":
    serve(sys.argv[1])
