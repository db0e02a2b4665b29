"""Runs on file systems without symbolic links, with failing calls, or whose files are removed while a run writes."""

import errno
import json
import os
import shutil

import pytest
from mpi4py import MPI

from halograd.cli.run import run as command
from halograd.data.disk import DataError, atomic_path
from halograd.errors import UserError
from halograd.training import checkpoints as module
from halograd.training.checkpoint import CheckpointReader, Snapshot, TrainingProgress, read_header, write_checkpoint
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.log import RunLog, read_log
from halograd.training.monitors import Callback
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.support.inject import refusing
from tests.training.runs import write_config

#: Errors of file systems, and a word of the remedy.
ERRORS = {
    errno.EIO: "log of the system",
    errno.ESTALE: "mount the file system again",
    errno.EXDEV: "choose another",
    errno.EROFS: "mount it to write",
    errno.EBUSY: "another process uses it",
    errno.EACCES: "permissions",
    errno.EMFILE: "ulimit -n",
}


@pytest.fixture
def snapshot(make_store):
    return Snapshot.of(make_store())


def write(folder, snapshot, *steps, best=False):
    for step in steps:
        folder.write(snapshot, TrainingProgress(step=step), "", best)


def names(path):
    return sorted(p.name for p in path.iterdir())


def test_without_symbolic_links(tmp_path, snapshot, monkeypatch):
    """Without symbolic links, as on SMB and exFAT, checkpoints are written, pruned and found by the names of links."""
    monkeypatch.setattr("pathlib.Path.symlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "none")))
    folder = CheckpointFolder(tmp_path, keep=1)
    with refusing("symlink", errno.EPERM), refusing("link", errno.EPERM):
        write(folder, snapshot, 1)
        write(folder, snapshot, 2, best=True)
        write(folder, snapshot, 3, 4)
    assert names(tmp_path) == ["best.h5", "latest.h5", "step-00000002.h5", "step-00000004.h5"]
    assert folder.latest == tmp_path / "step-00000004.h5"
    steps = {name: read_header(tmp_path / f"{name}.h5")[0].step for name in ("best", "latest")}
    assert steps == {"best": 2, "latest": 4}
    found, faults = CheckpointFolder(tmp_path).newest_whole()
    assert found is not None and found.path.name == "step-00000004.h5" and faults == []
    found.close()


def test_links_of_older_versions(tmp_path, snapshot):
    """Symbolic links of older versions are read, and replaced without a change of their checkpoint."""
    folder = CheckpointFolder(tmp_path)
    write(folder, snapshot, 1, 2)
    (tmp_path / "latest.h5").unlink()
    (tmp_path / "latest.h5").symlink_to("step-00000001.h5")
    old = (tmp_path / "step-00000001.h5").read_bytes()
    assert folder.latest == tmp_path / "step-00000001.h5" and read_header(tmp_path / "latest.h5")[0].step == 1
    write(folder, snapshot, 3)
    assert not (tmp_path / "latest.h5").is_symlink() and (tmp_path / "step-00000001.h5").read_bytes() == old
    assert (tmp_path / "latest.h5").read_text() == "step-00000003.h5\n"


@pytest.mark.parametrize("text", ["", "step-00000001.h5 and more", "../step-00000001.h5", "latest.h5", "\xff" * 20])
def test_a_name_that_cannot_be_read(tmp_path, snapshot, text):
    """If a file such as latest.h5 is damaged, the newest checkpoint is used; naming that file is an error."""
    folder = CheckpointFolder(tmp_path)
    write(folder, snapshot, 1, 2)
    (tmp_path / "latest.h5").write_text(text, encoding="latin-1")
    assert folder.latest == tmp_path / "step-00000002.h5"
    with pytest.raises(UserError, match=r"latest\.h5: .*damaged .*: step-00000002"):
        CheckpointReader(tmp_path / "latest.h5")


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("number", ERRORS, ids=errno.errorcode.get)
def test_what_cannot_be_written_is_named(tmp_path, snapshot, number, call):
    """An error of a call during writing gives a message with file, reason and remedy; existing files stay."""
    path = tmp_path / "step-00000001.h5"
    write_checkpoint(path, snapshot)
    before = path.read_bytes()
    with refusing(call, number), pytest.raises(DataError) as caught:
        write_checkpoint(path, snapshot)
    said = str(caught.value)
    assert said.startswith(f"cannot write {path}: {os.strerror(number).lower()}; ") and ERRORS[number] in said
    assert path.read_bytes() == before and names(tmp_path) == [path.name]


def test_a_folder_that_is_removed_meanwhile(tmp_path):
    said = r"cannot write \S+/new/a\.h5: its folder was removed or moved meanwhile; nothing was left behind"
    with pytest.raises(DataError, match=said), atomic_path(tmp_path / "new" / "a.h5", parents=True) as partial:
        partial.write_text("half")
        shutil.rmtree(partial.parent)
    with pytest.raises(FileNotFoundError, match="other"), atomic_path(tmp_path / "a.h5"):
        (tmp_path / "other").read_text()  # of another file: not said of this one
    assert names(tmp_path) == []


def test_a_name_that_cannot_be_written(tmp_path, snapshot, caplog):
    """If latest.h5 or best.h5 cannot be written, the run still finds its latest and its best checkpoint."""
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, snapshot, 1)
    with refusing("replace", errno.EIO, ".latest"), refusing("replace", errno.EIO, ".best"):
        write(folder, snapshot, 2, best=True)
        write(folder, snapshot, 3, 4)
    assert folder.latest == tmp_path / "step-00000004.h5"
    assert names(tmp_path) == ["step-00000002.h5", "step-00000004.h5"]
    (said,) = caplog.messages
    assert str(tmp_path / "latest.h5") in said and "input/output error" in said and "step-00000002.h5 is comp" in said
    write(folder, snapshot, 5)
    assert names(tmp_path) == ["best.h5", "latest.h5", "step-00000002.h5", "step-00000005.h5"]
    assert read_header(tmp_path / "best.h5")[0].step == 2


def test_what_cannot_be_removed(tmp_path, snapshot, caplog):
    """A checkpoint that cannot be removed gives one message, and is removed later; others are removed."""
    folder = CheckpointFolder(tmp_path, keep=1)
    write(folder, snapshot, 1)
    (tmp_path / ".step-00000000.h5.9.partial").write_text("half")
    (tmp_path / ".step-00000001.h5.9.partial").mkdir()
    with refusing("unlink", errno.EBUSY, "step-00000001.h5"):
        write(folder, snapshot, 2, 3)
    assert {"step-00000001.h5", "step-00000003.h5"} < {*names(tmp_path)} and "step-00000002.h5" not in names(tmp_path)
    assert ".step-00000000.h5.9.partial" not in names(tmp_path)
    (said,) = caplog.messages
    assert str(tmp_path / "step-00000001.h5") in said and "device or resource busy" in said
    write(folder, snapshot, 4)
    assert "step-00000001.h5" not in names(tmp_path)


def at_step(number, change):
    """Return a callback that calls `change` after a step."""

    class Changing(Callback):
        def on_step(self, step, loss, learning_rate):
            if step == number:
                change()

    return [Changing()]


def alone(config, settings=(), resume=False, callbacks=()):
    return train(config, [*settings], resume, comm=MPI.COMM_SELF, callbacks=callbacks)


@pytest.fixture
def run(tmp_path):
    """Return a configuration whose run has 3 epochs of 3 steps."""
    return write_config(tmp_path)


@pytest.mark.parametrize("to", ["removed", "moved", "another"])
def test_the_log_is_removed_while_the_run_writes(run, tmp_path, caplog, to):
    """If the log is moved, removed or replaced, the new log contains all steps, or those since the replacement."""
    log = tmp_path / "out" / "log.jsonl"

    def change():
        log.rename(tmp_path / "moved.jsonl")
        if to == "removed":
            (tmp_path / "moved.jsonl").unlink()
        if to == "another":
            log.write_text(json.dumps({"event": "mine"}) + "\n")

    alone(run, callbacks=at_step(5, change))
    first = 6 if to == "another" else 1
    assert [e["step"] for e in read_log(log, "step")] == list(range(first, 10))
    assert len(read_log(log, "mine")) == (to == "another") and len(read_log(log, "finished")) == 1
    assert sum("log.jsonl was removed or replaced" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
@pytest.mark.parametrize("step", [5, 9])
def test_the_directory_is_removed_while_the_run_writes(run, tmp_path, change, step):
    """If its directory is removed or moved, a run ends with a one-line error and creates no new directory."""
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"\S+/out to stay .*removed or moved"):
        alone(run, callbacks=at_step(step, lambda: change(out)))
    assert not out.exists()


def test_the_directory_is_removed_after_the_last_checkpoint(run, tmp_path, monkeypatch):
    """If the directory is removed after the last checkpoint, the run raises an error instead of returning its path."""
    out = tmp_path / "out"
    write = RunLog.write
    monkeypatch.setattr(
        RunLog, "write", lambda log, event, **v: (write(log, event, **v), event == "finished" and shutil.rmtree(out))
    )
    with pytest.raises(UserError, match="removed or moved"):
        alone(run)


def test_the_checkpoints_are_removed_while_the_run_writes(run, tmp_path, monkeypatch):
    """A run whose checkpoints are removed continues; a later error states that the written checkpoints are gone."""
    folder = tmp_path / "out" / "checkpoints"
    alone(run, callbacks=at_step(5, lambda: shutil.rmtree(folder)))
    assert evaluate(tmp_path / "out", comm=MPI.COMM_SELF)["step"] == 9
    shutil.rmtree(tmp_path / "out")

    def change():
        shutil.rmtree(folder)
        monkeypatch.setattr(module, "write_checkpoint", full)

    def full(*_):
        raise DataError("cannot write it: the disk is full")

    with pytest.raises(DataError, match=r"full; .*no longer in \S+/out/check"):
        alone(run, callbacks=at_step(5, change))


def cannot(path):
    path.parent.mkdir(parents=True)
    path.write_text("")


@pytest.mark.parametrize("make", [cannot, lambda path: (path.parent.mkdir(), path.symlink_to("checkpoints"))])
def test_a_folder_of_checkpoints_that_is_none(run, tmp_path, make):
    """A file in place of the folder of checkpoints is an error before the first step."""
    make(tmp_path / "out" / "checkpoints")
    with pytest.raises(UserError, match=r"\S+/out/checkpoints to be a folder"):
        alone(run, callbacks=at_step(1, lambda: pytest.fail("it trains")))
    assert not (tmp_path / "out" / "log.jsonl").exists()


def test_a_finished_run_is_resumed(run, capsys):
    alone(run, ["output.progress=true"])
    capsys.readouterr()
    alone(run, ["output.progress=true"], resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "complete: 3 of 3 epochs are done, at step 9" in said and "training.epochs" in said
    assert "resumed at step" not in said


@pytest.mark.parametrize("lost", ["log.jsonl", "checkpoints"])
def test_the_closing_line_claims_what_is_there(run, tmp_path, capsys, monkeypatch, lost):
    """The closing line of a run names no file that was removed after the last write."""
    out = tmp_path / "out"
    result = alone(run)
    monkeypatch.setattr("halograd.training.run.train", lambda *_, **__: result)
    assert command(["train", str(run)]) == 0
    assert f"{out} holds log.jsonl and checkpoints (best loss" in capsys.readouterr().out
    (shutil.rmtree if (out / lost).is_dir() else os.unlink)(out / lost)
    assert command(["train", str(run)]) == 0
    said = capsys.readouterr().out
    assert lost not in said and (": best.h5" in said) == (lost == "log.jsonl")
