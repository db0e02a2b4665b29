"""Tests of a user's codec and transport, in files that the configuration names: results, bytes, times, memory."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.codec import CODECS
from halograd.comm.transport import TRANSPORTS
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, count_step, memory_of, program_of, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.program import Target
from halograd.training import load_config
from halograd.training.checkpoint import CheckpointReader
from tests.docs.pages import write_files
from tests.launch import mpiexec
from tests.perfmodel.counted import differing
from tests.training.launching import losses, sets
from tests.training.reductions import BATCH, BUCKET, advance, build, trainer_of
from tests.training.runs import write_config
from tests.training.steps import NETWORKS

# Beside the files of docs/extending.md.
OTHERS = '''
import numpy as np
from halograd.comm.codec import Codec

class Same(Codec):
    """Float64, bit by bit."""
    dtype, wire, lossy = "float64", "uint64", False

    def encode(self, values, wire, work):
        wire[:] = values.view(np.uint64)

    def decode(self, wire, out):
        out.view(np.uint64)[:] = wire

class Late(Codec):
    """Without a decoder."""
    wire = "float16"

    def encode(self, values, wire, work):
        pass
'''


@pytest.fixture
def files(tmp_path_factory):
    """Return a folder with the user's files, the same on all ranks."""
    comm = MPI.COMM_WORLD
    folder = comm.bcast(tmp_path_factory.mktemp("own") if comm.rank == 0 else None)
    if comm.rank == 0:
        write_files("extending.md", folder)
        (folder / "others.py").write_text(OTHERS)
    comm.barrier()
    return folder


@pytest.fixture
def half(files):
    return f"{files / 'half.py'}:Half:scale=1024"


def run(config, out, *settings, ranks=2, resume=(), cwd=None):
    """Return the losses of a training run by the command line, by step."""
    common = ["training.epochs=2", "training.batch=2", f"output.directory={out}"]
    done = mpiexec(ranks, ["-m", "halograd", "train", config, *sets(*common, *settings), *resume], cwd=cwd)
    assert done.returncode == 0, done.stderr
    return losses(out)


def test_a_run_with_a_codec_of_a_file(files):
    """A codec without loss gives bitwise the run of ordered sums; residuals of a lossy one are resumed on one rank."""
    config = write_config(files)
    plain = run(config, files / "plain", "reduction.deterministic=true")
    assert run(config, files / "same", "reduction.payload=others.py:Same", cwd=files) == plain
    single = ["training.dtype=float32", "reduction.payload=half.py:Half:scale=1024"]
    found = run(config, files / "half", *single, cwd=files)
    assert list(found) == list(plain) and list(found.values()) != list(plain.values())
    assert list(found.values()) == pytest.approx(list(plain.values()), rel=1e-2)
    (newest,) = sorted((files / "half" / "checkpoints").glob("step-*.h5"))[-1:]
    with Communicator(MPI.COMM_SELF) as alone, CheckpointReader(newest, alone) as reader:
        kept = [path for path in reader._index["arrays"] if path.startswith("errors/")]
    assert kept
    longer = run(config, files / "half", *single, "training.epochs=3", ranks=1, resume=["--resume"], cwd=files)
    assert len(longer) == len(plain) * 3 // 2


def test_what_is_refused(files):
    config = write_config(files)
    for payload, message in {
        "half.py:Half:scale=x": r"reduction\.payload\.scale: expected a number, got 'x'",
        "half.py:Half:size=2": r"reduction\.payload\.size: unknown key; expected one of scale",
        "others.py:Late": r"reduction\.payload: .*:Late: expected a class that defines decode",
        "others.py:Full": r"reduction\.payload: expected a class 'Full' in .*others\.py, got Same, Late",
        "half.py:np": r"reduction\.payload: expected a class 'np'",
    }.items():
        with pytest.raises(UserError, match=message):
            load_config(config, [f"reduction.payload={files / payload}"])
    with pytest.raises(UserError, match=r"reduction\.payload: .*:Counted: .*from Codec"):
        Scheme(payload=f"{files / 'slow.py'}:Counted")
    strategy = Strategy(reduction=Scheme(payload=f"{files / 'half.py'}:Half"))
    with Communicator(MPI.COMM_SELF) as alone, pytest.raises(UserError, match=r'dtype = "float32" with ".*Half"'):
        build("lenet", alone, strategy, "float64")


def halves(values, scale):
    return (values * np.float32(scale)).astype(np.float16) / np.float32(scale)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["mpi", "auto"])
@pytest.mark.parametrize("count", [5, 70_001])
def test_sums_have_the_bits_of_the_definition_and_errors_come_back(comm, half, transport, count):
    def summand(rank):
        return np.random.default_rng([rank, count]).standard_normal(count).astype(np.float32)

    with Communicator(comm, transport) as ranks:
        total = ranks.reduction(summand(ranks.rank), codec=CODECS.make(half), kind="own")
        total.run()
        expected = np.zeros(count, np.float32)
        for rank in range(ranks.size):
            expected += halves(summand(rank), 1024)
        np.testing.assert_array_equal(total.buffer, halves(expected, 1024))
        assert (ranks.counters["own"].messages, ranks.counters["own"].bytes) == (1, 2 * count)
        error = np.zeros(count, np.float32)
        total.encoding.compensate(error)
        total.buffer[...] = summand(ranks.rank)
        total.run()
        np.testing.assert_array_equal(error, summand(ranks.rank) - halves(summand(ranks.rank), 1024))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("feedback", [True, False])
def test_a_step_is_counted_held_and_priced_as_predicted(comm, half, feedback):
    """With a user's codec, messages, memory and cost are as predicted."""
    scheme = Scheme("bucketed", payload=half, error_feedback=feedback)
    strategy = Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme)
    network = NETWORKS["lenet"]()
    with Communicator(comm, "mpi") as ranks, build("lenet", ranks, strategy) as executor:
        trainer = trainer_of(executor)
        advance(trainer, [0])
        trainer.synchronize()
        ranks.counters.reset()
        advance(trainer, [1])
        trainer.synchronize()
        counted = {kind: count for kind, count in ranks.counters.snapshot().items() if kind != "errors"}
        held = dict(executor.predicted_bytes)
        faults = differing(counted, count_step(network, strategy, BATCH, ranks.size, per_node=1), ranks.rank)
        target = Target(BATCH, ranks.size, ranks.rank, overlaps=ranks.waits_for_network)
        blocks = parameter_blocks(network, strategy, ranks.size)
        program, workspace = program_of(network, strategy, target, blocks), held["kernel workspace"]
        wanted = memory_of(program, blocks, 1, 1, workspace=workspace)
        ranks.agree(AssertionError(str(faults)) if faults else None)
    assert held["kernel workspace"] > 0
    assert held == wanted and ("gradient error" in held) is feedback


def test_the_price_follows_from_the_bytes(files):
    machine = Machine.load("lassen")

    def seconds(payload, feedback=True):
        scheme = Scheme("bucketed", payload=payload, error_feedback=feedback)
        strategy = Strategy({"sample": 8}, bucket_bytes=BUCKET, reduction=scheme)
        pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
        return simulate(NETWORKS["lenet"](), strategy, 8, pricing, Training("float32", 1)).step_seconds

    own = f"{files / 'half.py'}:Half"
    assert seconds(own) == seconds("bfloat16"), "as many bytes, as many passes over memory"
    assert seconds(own, False) == seconds("bfloat16", False) < seconds(own) != seconds("float32")


def test_a_run_with_a_transport_of_a_file(files):
    config = write_config(files)
    cut = "strategy.height=2", "strategy.small=keep"  # cuts of small layers, and so last bits, depend on the network
    plain = run(config, files / "plain", "backend.transport=shared", *cut)
    counted = "backend.transport=slow.py:Counted:file=made.jsonl"
    assert run(config, files / "own", counted, *cut, cwd=files) == plain
    slow = "backend.transport=slow.py:Slow:seconds=2e-3"
    assert run(config, files / "slow", slow, *cut, cwd=files) == plain
    noted = [line for line in (files / "made.jsonl").read_text().splitlines() if '"channels": 0' not in line]
    assert len(noted) == 2 and noted[0] == noted[1], "one communicator with channels on each of two ranks"


@pytest.mark.mpi(min_size=2)
def test_others_read_the_properties_of_a_transport(comm, files):
    """The library uses the properties of a user's transport: network, nodes and shared memory."""
    place = f"{files / 'slow.py'}:Slow:seconds=0.5"
    with Communicator(comm, place) as ranks:
        assert ranks.transport == place and ranks.shares_memory and ranks.network.alpha == 0.5
        assert ranks.waits_for_network and ranks.nodes == tuple(range(comm.size))
        assert ranks.reduction(np.ones(4, np.float32), method="hierarchical").buffer_bytes > 0
    with Communicator(comm, TRANSPORTS.make(f"{files / 'slow.py'}:Slow")) as ranks:
        assert ranks.transport == "Slow:seconds=0.001" and ranks.network.message(1000) == 1e-3
    with pytest.raises(CommError, match=r"transport: .*:Half: .*from Transport"):
        Communicator(comm, f"{files / 'half.py'}:Half")
