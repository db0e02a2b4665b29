"""`halograd submit`: its script, checks, submission and messages."""

from __future__ import annotations

import contextlib
import os
import pty
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from mpi4py import MPI  # noqa: F401  (before `submit` asks for it not to be started)

from halograd.cli.run import run
from tests.harness.jobs import job_environment, new_mark
from tests.jobs.examples import write_config
from tests.jobs.stubs import Stubs

#: A plan within a memory limit, for a machine that is described.
LIMITED = ["--set", "strategy=auto", "--set", "strategy.machine=cpu-core"]


@dataclass
class Submitting:
    """Callable that runs `halograd submit` with stubs of Slurm's commands."""

    folder: Path
    stubs: Stubs
    capsys: pytest.CaptureFixture[str]

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of ``halograd submit mesh.toml ARGUMENTS`` for 2 nodes with 2 ranks."""
        everything = ["submit", "mesh.toml", "--nodes", 2, "--ranks-per-node", 2, *arguments]
        self.capsys.readouterr()
        code = run(list(map(str, everything)))
        return code, *self.capsys.readouterr()

    def scripts(self) -> list[str]:
        return self.stubs.submitted()


@pytest.fixture
def submit(tmp_path, monkeypatch, capsys):
    write_config(tmp_path)
    stubs = Stubs(tmp_path / "stubs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.setenv("PATH", stubs.environment()["PATH"])
    return Submitting(tmp_path, stubs, capsys)


def test_a_job_is_written_and_submitted(submit):
    code, out, err = submit("--time", "10")
    assert code == 0, err
    assert out == "submitted job 101: 4 rank(s) with 1 core(s) each on 2 node(s); script run/mesh.sbatch\n"
    assert "data.path mesh.h5 does not exist here" in err
    (script,) = submit.scripts()
    kept = submit.folder / "run" / "mesh.sbatch"
    assert script == kept.read_text()
    assert f"cd -- {submit.folder} ||" in script and f"python=({sys.executable})" in script
    kept.write_text("# mine\n")
    code, _, err = submit("--time", "10")
    assert "is now run/mesh.sbatch.old1" in err and code == 0
    assert kept.with_name("mesh.sbatch.old1").read_text() == "# mine\n" and kept.read_text() == script


def test_a_dry_run_prints_the_script_and_nothing_else(submit, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    code, out, err = submit("--dry-run", "--partition", "gpu", "--job-name", "it's", "--cpus-per-rank", 2)
    assert (code, err) == (0, "")
    assert out.startswith('#!/bin/bash\n#SBATCH --job-name="it\'s"\n') and "--partition=gpu\n" in out
    assert submit.stubs.calls() == [] and not (submit.folder / "run").exists()


@pytest.mark.parametrize(
    ("options", "cores", "threads", "noted"),
    [
        ([], 1, 1, True),
        (["--cpus-per-rank", 8], 8, 8, False),
        (["--set", "backend.threads=3"], 3, 3, False),
        (["--set", "backend.threads=1"], 1, 1, False),
        (["--set", "backend.threads=3", "--cpus-per-rank", 4], 4, 3, False),
        (["--set", "backend.kernels=cudnn", "--gpus-per-node", 2, "--cpus-per-rank", 4], 4, 1, False),
    ],
)
def test_cores_that_are_reserved_are_used(options, cores, threads, noted, submit):
    """One option sets cores and threads; threads of the configuration take precedence; GPU runs need few cores."""
    code, script, err = submit("--dry-run", *options)
    assert code == 0, err
    assert f"#SBATCH --cpus-per-task={cores}\n" in script and f" OMP_NUM_THREADS={threads} " in script
    assert ("rank(s), one per GPU." if "--gpus-per-node" in options else f"rank(s) of {cores} core(s) each.") in script
    (train,) = [line for line in script.splitlines() if line.startswith("train=(")]
    stated = [word for word in train.strip(")").split() if "threads" in word]
    assert stated[-1:] in ([], [f"backend.threads={threads}"]) and bool(stated or threads == 1)
    assert ("halograd: note: every rank has one core; --cpus-per-rank N" in err) == noted


def test_a_profile_uses_the_cores_of_its_ranks(submit):
    code, script, err = submit("--dry-run", "--kind", "profile", "--cpus-per-rank", 8)
    assert code == 0 and " --threads 8 " in script, err


@pytest.mark.parametrize("directive", ["gres=gpu:2", "gpus=4", "exclusive", "constraint=a100"])
def test_gpus_by_another_name(directive, submit):
    code, script, err = submit("--dry-run", "--set", "backend.kernels=cudnn", "--sbatch", directive)
    assert code == 0 and f"#SBATCH --{directive}\n" in script, err


def test_a_local_job_finds_its_gpus_itself(submit):
    local = ["--kind", "local", "--nodes", 1, "--ranks-per-node", 4]
    code, _, err = submit(*local, "--dry-run", "--set", "backend.kernels=cudnn")
    assert (code, err) == (0, "")


ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "clusters.md", ROOT / "halograd" / "cli" / "submitting.py"]


def examples(page: Path) -> list[str]:
    """Return the lines of a page that submit a job."""
    text = page.read_text().replace("\\\n", " ")
    return [line.strip() for line in text.splitlines() if line.strip().startswith("halograd submit ")]


def test_pages_with_examples():
    day = ROOT / "docs" / "first_day.md"  # tests/docs/test_first_day.py submits its job
    assert {page for page in [*PAGES, *(ROOT / "docs").glob("*.md")] if examples(page)} == {*PAGES, day}


@pytest.mark.parametrize("line", [line for page in PAGES for line in examples(page)])
def test_examples_reserve_what_they_use(line, monkeypatch, capsys, caplog):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line, comments=True)[1:]
    if words[1] == "mesh.toml":  # of the reader
        words[1:2] = ["examples/mesh.toml", "--set", "training.batch=32"]
    assert run([*words, "--dry-run"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().err == "" and caplog.messages == []  # such as a note about idle ranks


def test_a_chain_waits_for_all_before_it(submit):
    code, out, err = submit("--chain", 3)
    assert code == 0 and out.startswith("submitted jobs 101, then 102, then 103: "), err
    calls = submit.stubs.calls("sbatch")
    waiting = [[w for w in call if w.startswith(("--dependency", "--kill"))] for call in calls]
    kill = "--kill-on-invalid-dep=yes"
    assert waiting == [[], ["--dependency=afternotok:101", kill], ["--dependency=afternotok:101:102", kill]]


def test_a_sweep_has_a_task_for_every_combination(submit):
    sweep = ["--sweep", "schedule.learning_rate=1e-3,1e-2", "--sweep", "model.widths=[[8], [8, 12]]", "--at-most", 2]
    code, _, err = submit(*sweep)
    assert code == 0, err
    (script,) = submit.scripts()
    assert "#SBATCH --array=0-3%2\n" in script and "%x-%A_%a.out" in script
    assert "3) run=run/003 train+=(--set schedule.learning_rate=1e-2 --set 'model.widths=[8, 12]' " in script


def test_profile_plan_and_training_wait_for_each_other(submit):
    code, out, err = submit("--kind", "plan-then-train", "--set", "training.batch=8")
    assert code == 0 and out.startswith("submitted jobs 101, then 102, then 103: "), err
    waiting = [[w for w in call if w.startswith("--dependency")] for call in submit.stubs.calls("sbatch")]
    assert waiting == [[], ["--dependency=afterok:101"], ["--dependency=afterok:102"]]
    profile, plan, train = submit.scripts()
    assert "--nodes=1\n" in profile and "profile mesh --out run/machine.toml --batch 8 --ranks 4 " in profile
    assert "plan mesh --machine run/machine.toml --out run/plan.json --ranks 4 --batch 8 " in plan
    assert '--set training.batch=8 --set \'strategy={"file" = "run/plan.json"}\'' in train


def submit_local(*arguments: object) -> list[str]:
    """Return a command that runs `halograd submit` of a local job in a separate process, which becomes the script."""
    local = ["submit", "mesh.toml", "--kind", "local", *map(str, arguments)]
    return [sys.executable, "-c", f"from halograd.cli.run import main; main({local})"]


def test_a_local_job_is_run_at_once(submit):
    done = subprocess.run(
        submit_local("--ranks-per-node", 4, "--mpirun", "mpirun"), cwd=submit.folder, env=job_environment(new_mark())
    )
    assert done.returncode == 0
    (call,) = submit.stubs.calls()
    assert call[:3] == ["mpirun", "-n", "4"] and call[-3:] == ["train", "mesh.toml", "--resume"]
    assert (submit.folder / "run" / "mesh.sh").exists()


# A launcher that forwards signals: Ctrl-C ends its ranks, USR1 makes them write a checkpoint.
LAUNCHER = """\
#!/bin/bash
trap 'echo interrupted; exit 130' INT
trap '[ -n "$HUNG" ] && echo ignored || { echo signaled; sleep 0.3; exit 75; }' USR1
echo started
while sleep 0.02; do :; done
"""


@pytest.mark.parametrize(("hung", "presses", "code", "said"), [("", 1, 75, "signaled"), ("yes", 2, 130, "interrupted")])
def test_ctrl_c_has_a_local_job_write_a_checkpoint(hung, presses, code, said, submit):
    """The first Ctrl-C makes a local job write a checkpoint; a second one ends processes that do not stop."""
    (submit.stubs.folder / "mpirun").write_text(LAUNCHER)
    command = submit_local("--ranks-per-node", 4, "--mpirun", submit.stubs.folder / "mpirun")
    process, terminal = pty.fork()
    if not process:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell, such as this suite, ignore it
        os.chdir(submit.folder)
        os.execve(command[0], command, {**job_environment(new_mark()), "HUNG": hung})
    told = ""
    with contextlib.suppress(OSError):  # the other end is closed
        for awaited in ("started", "ignored")[:presses]:
            while awaited not in told:
                told += os.read(terminal, 1000).decode()
            os.write(terminal, b"\x03")
        while more := os.read(terminal, 1000).decode():
            told += more
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == code, told
    assert ("signaled" in told, "interrupted" in told) == (said == "signaled", said == "interrupted")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", 3], "strategy: 2 height x 2 sample needs 4 ranks, the run has 6"),
        (["--gpus-per-node", 2], 'expected backend.kernels = "cudnn" with it, got "auto", which computes on CPUs; a'),
        (["--gpus-per-node", 2, "--set", "backend.kernels=onednn"], 'got "onednn", which computes on CPUs'),
        (["--set", "backend.kernels=cudnn"], 'expected GPUs for backend.kernels = "cudnn", got none; add --gpus'),
        (["--sweep", "backend.kernels=cudnn,auto", "--gpus-per-node", 2], 'got "auto", which computes on CPUs'),
        (["--gpus-per-node", 4, "--set", "backend.kernels=cudnn"], "expected one rank per GPU, got 2 ranks for 4 GPUs"),
        (["--set", "backend.threads=4", "--cpus-per-rank", 2], "expected a core for each of the 4 threads of a rank"),
        (["--sweep", "backend.threads=1,2"], "expected a core for each of the 2 threads of a rank (backend.threads)"),
        (["--set", "training.batch=0"], "training.batch"),
        (["--set", "model.name=moon"], "moon"),
        (["--stage", "/tmp", "--set", "data.path=['a.h5', 'b.h5']"], "expected one file or folder as data.path, got 2"),
        (["--stage", "/tmp", "--set", "data.path=*.h5"], "as data.path, got a pattern, '*.h5'; leave"),
        (["--stage", "/tmp", "--sweep", "data.path=a.h5,b.h5"], "as data.path, got one that the sweep changes; leave"),
        (["--sweep", "training.batch=2,0"], "training.batch"),
        (["--set", "strategy=auto", "--set", "strategy.planner=moon"], "strategy.planner: expected"),
        (["--set", "strategy=auto", "--set", "strategy.machine=moon"], "moon"),
        ([*LIMITED, "--set", "strategy.memory=1KiB"], "expected a strategy within 1 KiB per rank, the smallest found"),
        (["--kind", "moon"], "--kind: expected one of train, profile, plan-then-train, sweep, local, got 'moon'"),
        (["--kind", "train", "--sweep", "training.batch=2,4"], "--sweep: expected --kind sweep with it, got train"),
        (["--at-most", 2], "--at-most: expected --kind sweep with it, got train"),
        (["--kind", "profile", "--chain", 2], "--chain: expected --kind train with it, got profile"),
        (["--profile-nodes", 3], "--profile-nodes: expected 1 to 2, the nodes of the job, got 3"),
        (["--sbatch", "time=3"], "--sbatch time: expected another option, this one is set by --time"),
        (["--env", "A"], "--env: expected KEY=VALUE, such as NCCL_DEBUG=INFO, got 'A'"),
        (["--job-name", "a\nb"], "--job-name: expected text on one line, got '\\n'"),
        (["--set", "output.directory=mesh.toml"], "expected a path that can be written"),
    ],
)
def test_mistakes_are_found_before_the_job_waits(arguments, message, submit):
    code, out, err = submit(*arguments)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if "note:" not in line]
    assert len(lines) == 1 and lines[0].startswith("halograd: error: ") and message in lines[0], err
    assert submit.stubs.calls("sbatch") == []


def test_a_limit_within_which_there_is_a_plan(submit):
    assert submit(*LIMITED, "--set", "strategy.memory=1GiB")[0] == 0


def test_a_limit_holds_for_every_task_of_a_sweep(submit, monkeypatch):
    """The state of the optimizer counts: a later task may need more memory than the first one."""
    planned = []
    monkeypatch.setattr(
        "halograd.perfmodel.predict.plan_network", lambda *arguments: planned.append(arguments[-1].training.slots)
    )
    sweep = ["--sweep", "optimizer.kind=sgd,adam", "--sweep", "schedule.learning_rate=1e-3,1e-2"]
    assert submit(*LIMITED, "--set", "strategy.memory=1GiB", *sweep)[0] == 0
    assert planned == [0, 2]


def test_without_slurm_it_says_what_else_can_be_done(submit, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, _, err = submit()
    assert code == 2 and "expected sbatch on PATH, got none; call this on a login node" in err


def test_inside_a_job_it_is_refused(submit, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "4")
    code, _, err = submit()
    assert code == 2 and "submit: expected to be started alone, got a launcher" in err


def test_what_sbatch_refuses_is_passed_on(submit):
    """The message of sbatch is printed when it rejects a job; earlier jobs of the chain are canceled."""
    refuse = "#!/bin/bash\n[[ $* == *--dependency* ]] || { echo 101; exit; }\necho 'sbatch: error: No' >&2\nexit 1\n"
    (submit.stubs.folder / "sbatch").write_text(refuse)
    code, _, err = submit("--chain", 2)
    assert code == 2 and err.splitlines()[-1].endswith("to submit a job, got: sbatch: error: No")
    assert submit.stubs.calls("scancel") == [["scancel", "101"]]
