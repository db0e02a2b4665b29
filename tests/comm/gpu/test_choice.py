"""Tests of the choice of device transports, and of whether MPI can send device memory."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.gpu import DEVICE_TRANSPORTS, RankFacts, choose, link, mpi_aware
from halograd.comm.gpu.mpi_aware import claim_fault, clean_environment, proof_fault, prove
from halograd.comm.gpu.nccl import load_nccl
from halograd.device import HOST, DeviceError
from halograd.device.cupy import count_devices, import_cupy
from halograd.errors import UserError
from halograd.kernels.numpy import NumpyBackend
from halograd.training.backend import connect_device, open_kernels
from halograd.training.config import BackendConfig
from tests.support.fake_device import FakeDevice
from tests.support.gpu_ranks import gpu_ranks

A, B = "0000:3b:00.0", "0000:86:00.0"
NEW, OLD = 23203, 22809
BEST = RankFacts(0, A, nccl=NEW)
NO_MPI = "MPICH 5.0.2 does not report that it is CUDA-aware"


def ranks(*changes, **common):
    """Return the properties of ranks: `BEST` without a CUDA-aware MPI, and with these changes per rank."""
    return [replace(BEST, mpi_fault=NO_MPI, **{**common, **change}) for change in changes]


OWN = ({"gpu": A}, {"gpu": B})
SAME = ({"gpu": A}, {"gpu": A})
#: Instances of one GPU, by MIG.
PARTS = ({"gpu": A, "instance": "one"}, {"gpu": A, "instance": "two"})
APART = ({"node": 0}, {"node": 1})
AUTO = {
    "one rank": (ranks({}), "mpi-staged", "one rank: no messages"),
    "a GPU each": (ranks(*OWN), "nccl", "NCCL on every rank"),
    "nodes": (ranks(*APART), "nccl", "NCCL on every rank"),
    "an old NCCL, a GPU each": (ranks(*OWN, nccl=OLD), "nccl", "NCCL"),
    "a shared GPU, not asked for": (ranks(*SAME), "mpi-staged", "set NCCL_MULTI_RANK_GPU_ENABLE=1"),
    "a shared GPU, asked for": (ranks(*SAME, shares=True), "nccl", "NCCL on every rank"),
    "a shared GPU, asked for on one rank": (ranks({"shares": True}, {}), "mpi-staged", "on all ranks"),
    "a shared GPU, an old NCCL": (ranks(*SAME, nccl=OLD, shares=True), "mpi-staged", "2.30.3 is needed, got 2.28.9"),
    "just too old": (ranks(*SAME, nccl=23002, shares=True), "mpi-staged", "needed, got 2.30.2"),
    "just new enough": (ranks(*SAME, nccl=23003, shares=True), "nccl", "NCCL"),
    "no NCCL": (
        ranks(*OWN, nccl=0, nccl_fault="no libnccl.so.2"),
        "mpi-staged",
        r"rank 0 has no NCCL \(no libnccl.so.2",
    ),
    "two versions": (ranks({"gpu": A}, {"gpu": B, "nccl": OLD}), "mpi-staged", "rank 0 has NCCL 2.32.3, rank 1 2.28.9"),
    "instances, an NCCL that knows them": (ranks(*PARTS, shares=True, nccl=23102), "nccl", "NCCL"),
    "instances, an older NCCL": (
        [replace(f, mpi_fault="") for f in ranks(*PARTS, shares=True, nccl=23007)],
        "mpi-staged",
        r"ranks 0 and 1 use instances \(MIG\) of GPU .*NCCL 2.31.0 is needed, .*no mpi-cuda: .*each other's memory",
    ),
    "no NCCL, nodes": (ranks(*APART, nccl=0), "mpi-staged", "no mpi-cuda: rank 0: MPICH 5.0.2 does not"),
    "no NCCL, nodes, an MPI": ([replace(f, mpi_fault="") for f in ranks(*APART, nccl=0)], "mpi-cuda", "reaches device"),
    "no CUDA": (ranks({}, {"gpu": ""}), "mpi-staged", "rank 1 has no CUDA device"),
    "shared on two nodes": (
        ranks({"node": 0}, {"node": 0}, {"node": 1}, {"node": 1}, nccl=OLD),
        "mpi-staged",
        "ranks 0 and 1 share GPU",
    ),
}


@pytest.mark.parametrize("case", AUTO)
def test_auto(case):
    found, name, why = AUTO[case]
    result = choose("auto", found)
    assert result.name == name
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(result.describe())


REFUSED = {
    "nccl on a shared GPU": (
        "nccl",
        ranks(*SAME),
        f"'nccl': ranks 0 and 1 share GPU {A}; set NCCL_MULTI_RANK_GPU_ENABLE=1",
    ),
    "nccl that is old": (
        "nccl",
        ranks(*SAME, nccl=OLD),
        "for which NCCL 2.30.3 is needed, got 2.28.9; use 'mpi-staged', or",
    ),
    "nccl that is very old": ("nccl", ranks(*OWN, nccl=22507), "version 2.25.7 is older than 2.26.0"),
    "no nccl": (
        "nccl",
        ranks(*OWN, nccl=0, nccl_fault="none"),
        r"no NCCL \(none\); pip install nvidia-nccl-cu13, or use",
    ),
    "no device": ("nccl", ranks({"gpu": ""}), "rank 0 has no CUDA device; use 'mpi-staged'"),
    "nccl between instances": ("nccl", ranks(*PARTS), r"instances \(MIG\) of GPU .*; set NCCL_MULTI_RANK_GPU_ENABLE=1"),
    "removed": ("cuda-ipc", ranks(*OWN), "expected one of auto, nccl, mpi-cuda, mpi-staged, got .*, which was removed"),
    "mpi that is not aware": ("mpi-cuda", ranks(*OWN), "'mpi-cuda': rank 0: MPICH 5.0.2 does not .*; use 'nccl' or"),
    "no such name": ("gloo", ranks({}), "expected nccl, mpi-cuda, mpi-staged, or .*, got 'gloo'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_name_that_cannot_be_had(case):
    wanted, found, message = REFUSED[case]
    with pytest.raises(CommError, match=message):
        choose(wanted, found)


@pytest.mark.parametrize("name", DEVICE_TRANSPORTS.names)
def test_a_name_that_can_be_had(name):
    found = [replace(f, mpi_fault="") for f in ranks(*OWN)]
    assert choose(name, found).describe() == f"{name} (requested)"
    assert isinstance(choose(name, found).route, DEVICE_TRANSPORTS[name])


@pytest.mark.parametrize("text", ["-3", "0", "nan", "inf", "1e308", "soon"])
def test_a_timeout_that_is_none(text):
    with pytest.raises(CommError, match=rf"HALOGRAD_GPU_TIMEOUT: expected seconds > 0 and <= 1e6, got '{text}'"):
        link.timeout_from({"HALOGRAD_GPU_TIMEOUT": text})


def test_nccl_is_found_or_its_absence_said_in_one_line(monkeypatch):
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    try:
        assert load_nccl().get_version() > 0
    except CommError as error:
        assert "pip install" in str(error) and "\n" not in str(error)
    monkeypatch.setitem(__import__("sys").modules, "cupy.cuda.nccl", None)
    with pytest.raises(
        CommError, match=r"^nccl: expected cupy.cuda.nccl, got none \(.*\); pip install 'halograd\[gpu\]'"
    ):
        load_nccl()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1", "kernels of two communicators could wait for each other"
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    with pytest.raises(CommError):
        load_nccl()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0", "as the user has it"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharing", [False, True])
def test_ranks_find_out_what_they_have(sharing, monkeypatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with gpu_ranks(monkeypatch, "auto", sharing) as r:
        assert r.choice.name == ("mpi-cuda" if sharing else "nccl")
        assert r.comm.use_device(r.device) is r.choice
        with pytest.raises(CommError, match=r"expected '(nccl|mpi-cuda)', which was chosen, got 'mpi-staged'"):
            r.comm.use_device(r.device, "mpi-staged")
        stranger = FakeDevice()
        with pytest.raises(
            CommError, match=r"expected arrays on fake:0, for which (nccl|mpi-cuda) was chosen, got some on"
        ):
            r.comm.channel({}, {}, "float32", device=stranger)
        stranger.close()


@pytest.mark.ranks(2)
def test_ranks_on_instances_of_one_gpu(monkeypatch):
    """Instances (MIG) of a GPU have its address; their identifiers keep MPI from sending between their memories."""
    with gpu_ranks(monkeypatch, "none", sharing=True) as r:
        found = {"uuid": bytes([r.comm.rank] * 16)}
        monkeypatch.setattr(r.device.cupy.cuda.runtime, "getDeviceProperties", lambda ordinal: found)
        with pytest.raises(CommError, match=r"'mpi-cuda': ranks 0 and 1 use instances \(MIG\) of GPU 0000:3b:00.0"):
            r.comm.use_device(r.device, "mpi-cuda")
        assert r.comm.use_device(r.device).name == "mpi-staged"


@pytest.mark.ranks(2)
def test_devices_that_are_not_of_cuda_go_by_the_host(monkeypatch):
    device = FakeDevice()
    with Communicator(MPI.COMM_WORLD) as comm:
        with pytest.raises(CommError, match="'nccl': rank 0 has no CUDA device"):
            comm.use_device(device, "nccl")
        with pytest.raises(CommError, match="device transport: expected nccl, mpi-cuda"):
            comm.use_device(device, "smoke")
        part = comm.split(0)
        with pytest.raises(CommError, match="expected the root communicator"):
            part.use_device(device)
        assert comm.use_device(device).name == "mpi-staged" and comm.use_device(HOST).name == "mpi-staged"
    device.close()


@pytest.mark.ranks(2, 3)
def test_ranks_that_request_different_transports_are_refused():
    """A rank on the host would not take part in the choice, for which the others would wait."""
    device = FakeDevice()
    with Communicator(MPI.COMM_WORLD) as comm:
        with pytest.raises(CommError, match="expected 'auto' on a device as on rank 0, got 'auto' on the host on r"):
            comm.use_device(HOST if comm.rank == 1 else device)
        with pytest.raises(CommError, match="expected 'nccl' on a device as on rank 0, got 'auto' on a device on r"):
            comm.use_device(device, "auto" if comm.rank == 1 else "nccl")
        assert comm.devices.choice is None and comm.use_device(device).name == "mpi-staged"
    device.close()


@pytest.mark.ranks(2)
def test_mpi_that_claims_what_it_cannot_do_is_refused(monkeypatch):
    with pytest.raises(CommError, match=r"'mpi-cuda': rank 0: MPI ended by SIGSEGV .*; use 'nccl'"):  # noqa: SIM117
        with gpu_ranks(monkeypatch, "mpi-staged") as r:
            monkeypatch.setattr(link, "prove", lambda ordinal: mpi_aware.proof_fault(-11, "", ""))
            with Communicator(MPI.COMM_WORLD) as comm:
                comm.use_device(r.device, "mpi-cuda")


@pytest.mark.ranks(2)
def test_a_device_that_does_not_answer(monkeypatch):
    def broken(device):
        raise RuntimeError("cudaErrorUnknown")

    monkeypatch.setattr(link, "gpu_address", broken)
    device = FakeDevice()
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        pytest.raises(CommError, match="learn what the device can do, got cudaErr"),
    ):
        comm.use_device(device)
    device.close()


@pytest.mark.ranks(1, 2)
def test_a_run_says_how_arrays_travel_or_why_they_cannot(monkeypatch):
    with gpu_ranks(monkeypatch, "auto") as r:
        kernels = r.kernels
        connect_device(kernels, r.comm, "auto")  # chosen already: nothing to do
        assert r.comm.devices.choice is r.choice
        with Communicator(MPI.COMM_WORLD) as comm:
            connect_device(NumpyBackend(), comm, "auto")
            assert comm.devices.choice is None
            connect_device(kernels, comm, "mpi-staged")
            assert comm.devices.choice.describe() == "mpi-staged (requested)"
        r.nccl.version = 20604
        with (
            Communicator(MPI.COMM_WORLD) as comm,
            pytest.raises(UserError, match=r"^backend.device_transport: .*'nccl'") as e,
        ):
            connect_device(kernels, comm, "nccl")
        assert e.value.agreed and e.value.arose_here == (MPI.COMM_WORLD.rank == 0)
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        pytest.raises(UserError, match=r"backend.device_transport: expected kernels"),
    ):
        open_kernels(BackendConfig(kernels="numpy", device_transport="nccl"), comm)


def fake_mpi(kinds="mpi,system"):
    info = SimpleNamespace(get=lambda key: kinds if key == "mpi_memory_alloc_kinds" else None)
    return SimpleNamespace(
        __file__=MPI.__file__,
        COMM_WORLD=SimpleNamespace(Get_info=lambda: info),
        Exception=MPI.Exception,
        get_vendor=lambda: ("MPICH", (5, 0, 2)),
    )


def test_what_mpi_says_of_itself(monkeypatch):
    monkeypatch.setattr(mpi_aware, "_reports_support", lambda mpi: False)
    assert claim_fault(fake_mpi(), {}).startswith("MPICH 5.0.2 does not report that it is CUDA-aware (if it is, set")
    assert claim_fault(fake_mpi("mpi,system,cuda:device"), {}) == ""
    assert claim_fault(fake_mpi(None), {}) != ""
    for switch in mpi_aware.SWITCHES:
        assert claim_fault(fake_mpi(), {switch: "1"}) == "" and claim_fault(fake_mpi(), {switch: "0"}) != ""
    monkeypatch.setattr(mpi_aware, "_reports_support", lambda mpi: True)
    assert claim_fault(fake_mpi(), {}) == ""


def test_a_library_that_cannot_be_asked():
    assert mpi_aware._reports_support(SimpleNamespace(__file__="/nowhere/MPI.so")) is False
    assert mpi_aware._reports_support(MPI) in (True, False)


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, "proven\n", "", ""),
        (0, "", "", "MPI could not send device memory to itself (exit code 0)"),
        (-11, "", "", "MPI ended by SIGSEGV when it sent device memory to itself"),
        (
            2,
            "",
            "8 bytes came back changed\n",
            "MPI could not send device memory to itself (8 bytes came back changed)",
        ),
        (3, "noise", "first\nlast\n\n", "MPI could not send device memory to itself (last)"),
    ],
)
def test_what_the_proof_has_shown(code, out, err, fault):
    assert proof_fault(code, out, err) == fault


def test_the_proof_is_no_rank_of_the_job():
    job = {
        "PMI_RANK": "1",
        "PMIX_ID": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "SLURM_PROCID": "0",
        "HYDRA_X": "",
        "PATH": "p",
    }
    assert clean_environment(job) == {"PATH": "p"}


def test_the_proof_without_a_gpu_says_so():
    """On a machine without a GPU the trial process reports the missing device or CuPy; it uses the real MPI."""
    try:
        if count_devices(import_cupy()):
            pytest.skip("needs a machine without a GPU")
    except DeviceError:
        pass
    fault = prove(0, seconds=100)
    assert "expected a CUDA device, got none" in fault or "expected CuPy for a GPU" in fault


def test_a_proof_that_does_not_end(monkeypatch):
    monkeypatch.setattr(mpi_aware.sys, "executable", "/bin/sleep")
    assert "MPI could not send device memory to itself" in prove(0)
    monkeypatch.setattr(mpi_aware.sys, "executable", "/nowhere/python")
    assert "could not be run" in prove(0)
    monkeypatch.setattr(mpi_aware.subprocess, "run", expired)
    assert prove(0, 2) == "MPI did not send device memory to itself within 2 s"


def expired(command, timeout, **options):
    raise mpi_aware.subprocess.TimeoutExpired(command, timeout)
