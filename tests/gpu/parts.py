"""The parts of the GPU check in the order of their value, each after those that it depends on.

The limits of the jobs up to `cutting` add up to half an hour with the starts of three machines; most jobs need less,
and the other parts follow in the time that is left. `tests/gpu/command.py: SECONDS` is the duration of a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tests.gpu.runner import Job, Part

__all__ = ["HALF_HOUR", "PARTS"]

OWN = "tests/kernels/cuda"
CUDNN = "tests/kernels/cudnn/test_on_gpu.py"
KERNELS = "tests/gpu/test_kernels.py"
RANKS = "tests/gpu/test_ranks.py"
TRANSPORTS = "tests/gpu/test_transports.py"
PRECISIONS = ("strict", "bfloat16", "tf32", "float64", "float16")
#: Ranks of one GPU; NCCL lets two share it from 2.30.3 on, if it is asked to. A peer that is gone is noticed early.
SHARING: Mapping[str, str] = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "HALOGRAD_GPU_TIMEOUT": "30"}


def _convolutions() -> Iterator[Job]:
    for precision in ("bfloat16", "strict"):
        chosen = f"test_numbers and {precision} and k3s1p1 and not channels"
        yield Job(f"first, {precision}", (CUDNN, "-k", chosen), seconds=60)
    for precision in PRECISIONS:
        chosen = precision + " and not bfloat16" * (precision == "float16") + " and not attention"
        yield Job(precision, (CUDNN, KERNELS, "-k", chosen), seconds=60 if precision in PRECISIONS[:2] else 40)
    yield Job("denormals", (KERNELS, "-k", "denormals"), seconds=20)


#: Of the tests that every backend passes, those of two jobs; the third has the rest.
UPDATES = "sgd or adam or lars or update or length or finite or scale or loss or entropy or error or target or divisor"
SHAPES = "norm or resize or outputs or bits or infinite"


def _own() -> Iterator[Job]:
    for name in ("boxes", "around", "pooling"):
        yield Job(name, (f"{OWN}/test_{name}.py",), seconds=30)
    rest = f"not ({UPDATES}) and not ({SHAPES})"
    for what, chosen in (("updates", UPDATES), ("shapes", f"({SHAPES}) and not ({UPDATES})"), ("rest", rest)):
        yield Job(f"as a backend, {what}", (f"{OWN}/test_as_backend.py", "-k", chosen), seconds=45)


def _staged() -> Iterator[Job]:
    for ranks in (1, 2, 4):
        for chosen in ("test_layers", "test_training and float32", "test_training and bfloat16"):
            yield Job(f"{ranks} ranks, {chosen}", (RANKS, "-k", chosen), ranks, 40, SHARING)
        chosen = "slow or optimizers or graphs"
        yield Job(f"{ranks} ranks, {chosen}", (RANKS, "-k", chosen), ranks, 40, SHARING)


def _transports() -> Iterator[Job]:
    yield Job("nccl, 1 rank", (TRANSPORTS,), 1, 60, SHARING)
    for name in ("nccl", "mpi-cuda"):
        yield Job(f"{name}, 2 ranks", (TRANSPORTS, "-k", name), 2, 75, SHARING)


def _steps(subjects: tuple[str, ...], precisions: tuple[str, ...], seconds: float) -> Iterator[Job]:
    for subject in subjects:
        for precision in precisions:
            name = f"{subject}, {precision}"
            yield Job(name, ("steps", subject, precision), seconds=seconds, module="benchmarks.gpu")


def _timing(*arguments: str, seconds: float) -> Job:
    return Job(" ".join(arguments), arguments, seconds=seconds, module="benchmarks.gpu")


_WAITS = "does_not_wait"
#: Names of tests/training/device_steps.py: NETWORKS, which needs NumPy.
NETWORKS = ("mesh", "resnet", "unet", "lenet")
PARTS: tuple[Part, ...] = (
    Part(
        "environment",
        "do the libraries load and belong together, and do two ranks start?",
        (
            Job("libraries", ("tests/gpu/test_environment.py",), seconds=60),
            Job("2 ranks", ("tests/gpu/test_environment.py",), 2, 40, SHARING),
        ),
        together=2,
    ),
    Part(
        "convolutions",
        "do plans of cuDNN execute, and are all kernels right in all precisions?",
        tuple(_convolutions()),
        together=8,
    ),
    Part(
        "capture",
        "do graphs of cuDNN, cuBLAS and CuPy repeat what eager steps compute?",
        (
            Job("graphs", ("tests/gpu/test_capture.py",), seconds=80),
            Job("streams and plans", (CUDNN, "-k", "streams or kept or deterministic"), seconds=60),
        ),
        together=2,
    ),
    Part("host", "what does the host take per launch?", (_timing("host", seconds=40),)),
    Part("norms", "what share of the bandwidth do norms reach?", (_timing("norms", seconds=25),)),
    Part(
        "fusions",
        "are sums in the epilogue of a convolution faster than a pass over its output?",
        (_timing("fusions", seconds=90),),
    ),
    Part(
        "steps",
        "does a step wait for the device; how long does it take beside torch?",
        (
            Job("no waiting", ("tests/gpu/test_steps.py", "-k", _WAITS), seconds=40),
            *_steps(("resnet50-b1",), ("bf16",), 110),
            *_steps(("mesh-2K", "resnet50"), ("bf16",), 140),
        ),
    ),
    Part("own", "are our own kernels right on the device, each alone?", tuple(_own()), together=6),
    Part(
        "cutting",
        "what do copies, halos and cutting cost, without the wires?",
        (_timing("copies", seconds=40), _timing("cutting", "mesh-2K", "bf16", seconds=150)),
    ),
    Part(
        "attention",
        "is cuDNN's attention right, and ours?",
        (
            Job("bfloat16", (CUDNN, "-k", "attention and bfloat16"), seconds=80),
            Job("float16", (CUDNN, "-k", "attention and float16 and not bfloat16"), seconds=80),
            Job("strict", (CUDNN, "-k", "attention and strict"), seconds=60),
        ),
        together=3,
    ),
    Part(
        "attention-times",
        "how long does attention take beside torch's?",
        (_timing("attention", seconds=90),),
    ),
    Part(
        "staged",
        "are layers and training right with 1, 2 and 4 ranks on one GPU, by staged messages?",
        tuple(_staged()),
        together=4,
    ),
    Part("transports", "do NCCL and a CUDA-aware MPI carry messages and sums?", tuple(_transports()), together=3),
    Part(
        "large",
        "are arrays of more than 2^31 elements right, and is memory what was predicted?",
        (
            Job("2^32 elements", ("tests/gpu/test_large.py",), seconds=240),
            Job("memory", ("tests/gpu/test_steps.py", "-k", "memory"), seconds=200),
        ),
    ),
    Part(
        "models",
        "how long do the other networks take?",
        tuple(_steps(("mesh-1K", "unet-512", "unet-3d"), ("bf16",), 150)),
    ),
    Part("steps-tf32", "the same in TF32", tuple(_steps(("mesh-2K", "resnet50"), ("tf32",), 220))),
    Part(
        "sanitizer",
        "does compute-sanitizer find anything in a small step?",
        tuple(
            Job(f"{tool}, {network}", (tool, network), seconds=60, module="tests.gpu.sanitize")
            for tool in ("memcheck", "racecheck")
            for network in NETWORKS
        ),
    ),
)
#: The parts whose limits add up to half an hour.
HALF_HOUR = PARTS[: [part.name for part in PARTS].index("cutting") + 1]
