"""The parts by which runs survive, without MPI: signals, who is to blame, which cuts fit."""

import os
import signal
import threading

import pytest

from halograd.errors import UserError
from halograd.models import mesh
from halograd.training.build import fitting_cuts, other_cuts
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.config import StrategyConfig
from halograd.training.signals import StopSignals
from halograd.training.watch import Place, describe_stall
from halograd.training.watchdog import oom_kills


def test_the_first_signal_counts_and_handlers_come_back():
    before = [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)]
    with StopSignals() as signals:
        assert (signals.received, signals.vote) == (None, 0)
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        assert (signals.received, signals.vote) == (signal.SIGUSR1, signal.SIGUSR1)
    assert [signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM)] == before


def test_what_came_before_counts_too():
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        with StopSignals() as signals:
            assert signals.received == signal.SIGTERM
            signal.raise_signal(signal.SIGUSR1)
            assert signals.received == signal.SIGTERM
        signal.raise_signal(signal.SIGUSR1)  # does not end this process


def test_no_signals_outside_of_the_main_thread():
    found = []

    def work():
        with StopSignals() as signals:
            found.append(signals.vote)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]


def place(step=4, waiting="", idle=60.0, layer="conv1"):
    return Place(step, "forward", layer, waiting, "flags.py:88", idle)


STALLS = [
    ([place(waiting="halo: conv1"), place(), place(waiting="loss")], 1, "step 5, forward of layer 'conv1', not in an"),
    ([place(waiting="halo: conv1"), place(), None], 2, "it does not answer"),
    ([place(waiting="loss"), place(step=3, waiting="loss")], 1, "step 4, .* waiting for 'loss' .at flags.py:88"),
    ([place(idle=60, layer=""), place(idle=90)], 1, "'conv1'.*The others: rank 0 on n0: step 5, forward, not in"),
    ([place(waiting="halo")] * 7 + [place()], 7, "The others: rank 0 .*rank 3 on n3: [^;]*; and 3 more"),
]


@pytest.mark.parametrize(("places", "culprit", "text"), STALLS, ids=["idle", "mute", "behind", "longest", "many"])
def test_who_holds_up_the_others(places, culprit, text):
    import re

    rank, told = describe_stall([f"n{r}" for r in range(len(places))], dict(enumerate(places)), 90.0)
    assert rank == culprit and told.startswith("no progress for 1.5 min: ") and re.search(text, told)
    assert Place.from_dict({**place().as_dict(), "kind": "place"}) == place()


def test_cuts_that_fit():
    network = mesh(resolution=16, channels=3, widths=(4, 6), convs=1)
    wanted = {"height": 2, "width": 2}
    assert fitting_cuts(network, 2, 4, wanted)[0] in (
        {**dict.fromkeys(("sample", "depth", "width"), 1), "height": 2},
        {**dict.fromkeys(("sample", "depth", "height"), 1), "width": 2},
    )
    assert all(parts["sample"] <= 4 and parts["depth"] == 1 for parts in fitting_cuts(network, 24, 4, wanted))
    assert fitting_cuts(network, 17, 4, wanted) == []
    config = StrategyConfig(height=2, width=2)
    assert other_cuts(config, 17, network, 4) == "; for 17 ranks: `--set strategy=auto`"
    assert other_cuts(config, 1, network, 4) == (
        "; for 1 rank: `--set strategy.height=1 --set strategy.width=1` or `--set strategy=auto`"
    )
    assert other_cuts(config, 2, None, None) == ""


def test_a_link_set_back_by_hand(tmp_path):
    """A user may point latest.h5 to an older checkpoint: that one is taken, newer ones are left alone."""
    folder = CheckpointFolder(tmp_path, keep=1)
    for step in (5, 10):
        (tmp_path / f"step-{step:08d}.h5").touch()
    (tmp_path / "latest.h5").symlink_to("step-00000005.h5")
    assert [p.name for p in folder._candidates()] == ["step-00000005.h5"]
    (tmp_path / "latest.h5").unlink()
    (tmp_path / "latest.h5").symlink_to("step-00000007.h5")
    assert [p.name for p in folder._candidates()] == ["step-00000010.h5", "step-00000005.h5"]
    with pytest.raises(UserError, match="all are damaged"):
        folder.newest_whole()


def test_counting_kills_for_lack_of_memory():
    assert oom_kills() >= 0
