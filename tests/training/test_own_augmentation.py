"""Tests of an augmentation in a user's file: the same changes under every cut, and in a resumed run."""

import pytest
from mpi4py import MPI

from halograd.training import train
from halograd.training.log import read_log
from tests.docs.pages import write_files
from tests.training.cuts import CUTS, logged_losses, overrides_of
from tests.training.runs import check_refused, write_config

OWN = 'data.augment={kind="fade.py:Fade", share=0.9}'
SETS = [OWN, 'schedule.kind="constant"']
BOTH = """
from fade import Fade
from swirl import Swirl

class Both(Swirl):
    class Settings(Swirl.Settings, Fade.Settings):
        pass

    def alter(self, name, batch, box, part):
        super().alter(name, batch, box, part)
        Fade.alter(self, name, batch, box, part)
"""


def write(folder):
    write_config(folder)
    write_files("extending.md", folder)
    (folder / "both.py").write_text(BOTH)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(
    "own",
    [OWN, 'data.augment={kind="both.py:Both", flips=["width"], turns=true, noise=0.1, strength=2.0}'],
    ids=["alone", "both"],
)
def test_under_every_cut_and_resumed(comm, config, own):
    sets = [own, *SETS[1:]]
    if comm.rank == 0:
        train(config, [*sets, "output.directory=alone"], comm=MPI.COMM_SELF)
        train(config, ["output.directory=plain", *SETS[1:]], comm=MPI.COMM_SELF)
    comm.barrier()
    want, plain = (logged_losses(config.parent / name) for name in ("alone", "plain"))
    assert len(want) == len(plain) and not {*want} & {*plain}
    validations = [[e["loss"] for e in read_log(config.parent / "alone/log.jsonl", "validation")]]
    for number, cut in enumerate(CUTS[comm.size]):
        more = [*sets, *overrides_of(cut), f"output.directory=cut{number}"]
        train(config, [*more, "training.epochs=2"], comm=comm)
        comm.barrier()
        train(config, more, resume=True, comm=comm)
        comm.barrier()
        assert logged_losses(config.parent / f"cut{number}") == pytest.approx(want, rel=1e-9)
        found = [e["loss"] for e in read_log(config.parent / f"cut{number}/log.jsonl", "validation")]
        assert found == pytest.approx(validations[0], rel=1e-9)
        comm.barrier()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.augment.share=2"], "data.augment.share: expected a number < 1, got 2"),
        (["data.augment.flips=['width']"], "data.augment.flips: unknown key; expected one of kind, share"),
        (['data.augment.kind="fade.py:Fall"'], "data.augment.kind: expected a class 'Fall' in fade.py, got Fade"),
        (["data.augment={flips = ['up']}"], "data.augment.flips[0]: expected one of 'depth', 'height' or 'width', got"),
        (["data.augment={flip = 1}"], "data.augment.flip: unknown key; expected one of kind, flips, turns, shifts, "),
        (["data.augment={kind = 'mine'}"], "data.augment.kind: expected standard, or \"FILE.py:CLASS\", got 'mine'"),
        (["data.augment=3"], "data.augment: expected a table, got 3"),
    ],
)
def test_what_is_refused_in_one_line(tmp_path, monkeypatch, sets, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    check_refused([OWN, *sets], message)
