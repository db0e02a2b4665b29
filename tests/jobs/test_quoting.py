"""No value of a user is executed as a command: it is rendered literally, or raises a one-line error."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from halograd.documents import to_toml
from halograd.errors import UserError
from halograd.jobs import parse_directives, parse_environment, parse_sweep, quoting, render, scripts
from tests.harness.limits import LIMIT, wait_until
from tests.jobs.examples import PROFILING, job
from tests.jobs.stubs import Stubs
from tests.support.refusals import refusals

HOSTILE = [
    "a b  c",
    "it's",
    'say "x"',
    "$(touch PWNED)",
    "`touch PWNED`",
    "; touch PWNED",
    "x && touch PWNED #",
    "'; touch PWNED; '",
    '"; touch PWNED; "',
    "$HOME ${PATH} $1",
    "back\\slash\\",
    "* ? [a-z] {a,b}",
    "~root",
    "--help",
    "!!",
    "%j %x %%",
    "{{ 7 * 7 }}{% raw %}",
    "#SBATCH --nodes=99",
    "END_OF_TRAIN_JOB",
    "größe 模型",
    "a|b>PWNED<c",
    "",
]
TWO_LINES = ["a\nb", "a\rb", "a\n#SBATCH --nodes=99", "a\x00b", "a\x1bb", "a\u2028b", "a\udc80b"]


@pytest.fixture
def stubs(tmp_path):
    found = Stubs(tmp_path / "stubs")
    yield found
    assert not list(tmp_path.rglob("PWNED")), "a value has run a command"


def rendered(kind: str = "train", **changes) -> str | None:
    """Return the rendered script; None if a value raised a one-line error."""
    try:
        return render(kind, job(**changes))
    except UserError as error:
        assert "\n" not in str(error) and "expected" in str(error)
        return None


def trained(stubs: Stubs) -> list[str]:
    (call,) = [call for call in stubs.calls() if "train" in call]
    return call


@pytest.mark.parametrize("text", HOSTILE)
def test_values_reach_the_program_literally(text, stubs, tmp_path):
    """Special characters in any value of a job reach the program literally."""
    (tmp_path / "in" / f"x{text}").mkdir(parents=True)
    values = {
        "config": f"{text}.toml",
        "overrides": [f"model.name={text}"],
        "folder": str(tmp_path / "in" / f"x{text}"),
    }
    script = rendered(**values, run=f"x{text}", modules=[f"m{text}"], python=f"p{text}")
    done = stubs.run(script)
    assert done.returncode == 0, done.stderr
    call = trained(stubs)
    config = f"{text}.toml" if not text.startswith("-") else f"./{text}.toml"
    program = ["-m", "halograd", "train", config, "--resume", "--set", f"model.name={text}"]
    assert call[call.index("-m") - 1 :] == [f"p{text}", *program]
    assert stubs.calls("module") == [["module", "load", f"m{text}"]]


@pytest.mark.parametrize("text", HOSTILE)
def test_environment_and_folder_are_literal(text, stubs, tmp_path):
    folder = tmp_path / "in" / f"x{text}"
    folder.mkdir(parents=True)
    script = rendered(folder=str(folder), environment={"VALUE": text}).partition("# -- how programs")[0]
    done = stubs.run(script + 'printf "%s\\n%s\\n" "$VALUE" "$PWD"')
    assert done.stdout.splitlines()[-2:] == [text, str(folder)], done.stderr


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_containers_and_launchers_are_literal(text, runtime, stubs):
    launcher = "mpirun" if runtime == "apptainer" else "srun"
    script = rendered(container=f"i{text}", runtime=runtime, launcher=launcher, folder=str(stubs.folder))
    assert stubs.run(script).returncode == 0
    assert any(f"i{text}" in word for word in trained(stubs))
    script = rendered(launcher="mpirun", mpirun=text)
    if script is not None:
        (line,) = re.findall(r"^launch=\((.*)\)$", script, re.M)
        assert shlex.split(line)[0] == text


@pytest.mark.parametrize("text", HOSTILE)
def test_staged_data_are_literal(text, stubs):
    script = rendered(data=f"d{text}", stage=f"/tmp/x{text}", folder=str(stubs.folder))
    done = stubs.run(script)
    assert done.returncode == 0, done.stderr
    (copied,) = [call for call in stubs.calls("srun") if "copy" in call]
    name = os.path.basename(os.path.normpath(f"d{text}"))
    assert copied[-2:] == [f"d{text}", f"/tmp/x{text}/halograd-7/{name}"]
    assert f"data.path=/tmp/x{text}/halograd-7/{name}" in trained(stubs)
    assert stubs.calls("srun")[-1][-4:] == ["rm", "-rf", "--", f"/tmp/x{text}/halograd-7"]


def test_nodes_may_stage_in_one_folder(stubs, tmp_path):
    """Several nodes may stage data in one shared folder; no node reads a partial copy of another."""
    stage, slow, data = tmp_path / "halograd-7", tmp_path / "slow", tmp_path / "data"
    stubs.run(rendered(data=str(data), stage=str(tmp_path), folder=str(stubs.folder)))
    (call,) = [call for call in stubs.calls("srun") if "copy" in call]
    copy = call[call.index("bash") : -2]
    stage.mkdir()
    os.mkfifo(slow)
    data.write_bytes(b"whole")

    def node(number: int, source: Path) -> subprocess.Popen:
        return subprocess.Popen([*copy, source, stage / "data"], env={**os.environ, "SLURM_NODEID": str(number)})

    first = node(0, slow)
    with open(slow, "wb") as feed:
        wait_until(lambda: any(stage.iterdir()), "half a copy")
        assert [path.name for path in stage.iterdir()] == ["data.0"]
        assert node(1, data).wait(LIMIT) == 0 and (stage / "data").read_bytes() == b"whole"
        feed.write(b"whole")
    assert first.wait(LIMIT) == 0
    assert [path.read_bytes() for path in stage.iterdir()] == [b"whole"]

    (stage / "data").unlink()
    folder = tmp_path / "patients"
    folder.mkdir()
    (folder / "s1.h5").symlink_to(data)
    assert [node(number, folder).wait(LIMIT) for number in (0, 1)] == [0, 0]
    assert [path.name for path in stage.iterdir()] == ["data"]
    assert [path.name for path in (stage / "data").iterdir()] == ["s1.h5"]
    assert not (stage / "data" / "s1.h5").is_symlink() and (stage / "data" / "s1.h5").read_bytes() == b"whole"


def test_a_folder_may_begin_with_a_variable_of_the_job(stubs):
    script = rendered(stage="$SCRATCH/$(touch PWNED)", folder=str(stubs.folder))
    assert stubs.run(script, SCRATCH="/fast disk").returncode == 0
    assert "data.path=/fast disk/$(touch PWNED)/halograd-7/mesh.h5" in trained(stubs)
    done = stubs.run(script)
    assert done.returncode != 0 and "SCRATCH: is not set on this node" in done.stderr


@pytest.mark.parametrize("text", HOSTILE)
def test_settings_of_a_sweep_are_literal(text, stubs):
    settings = [["data.path=other"], [f"data.path={text}", "training.batch=2"]]
    script = rendered("sweep", run=f"r{text}", settings=settings, folder=str(stubs.folder))
    ids = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "1"}
    assert stubs.run(script, **ids).returncode == 0
    call = trained(stubs)
    chosen = ["--set", f"data.path={text}", "--set", "training.batch=2", "--set"]
    assert call[-6:-1] == chosen and call[-1] == f"output.directory={to_toml(f'r{text}/001')}"


@pytest.mark.parametrize("text", HOSTILE)
def test_profile_and_plan_are_literal(text, stubs):
    profiling = replace(PROFILING, model=f"m{text}", options={"name": text}, planner=text, memory=text)
    script = rendered("plan-then-train", run=f"r{text}", profiling=profiling, folder=str(stubs.folder))
    done = stubs.run(script)
    assert done.returncode == 0 and done.stdout == "101 102 103\n", done.stderr
    profile, plan, train = stubs.submitted()
    for part in (profile, train):
        assert stubs.run(part, cwd=stubs.folder).returncode == 0
    (call,) = [call for call in stubs.calls("srun") if "profile" in call]
    assert f"m{text}" in call and f"name={to_toml(text)}" in call and f"r{text}/machine.toml" in call
    assert trained(stubs)[-1] == f"strategy={to_toml({'file': f'r{text}/plan.json'})}"
    words = shlex.split(plan.splitlines()[-1])
    assert words[words.index("--memory") + 1] == text and words[words.index("--planner") + 1] == text


@pytest.mark.parametrize("text", [text for text in HOSTILE if text.strip() and "/" not in text])
@pytest.mark.parametrize("name", ["name", "partition", "account"])
def test_directives_stay_on_their_line(name, text):
    """Values cannot end the line of an #SBATCH directive; test_slurm.py shows that sbatch reads them literally."""
    plain = [line.partition("=")[0] for line in rendered(partition="p", account="a").splitlines() if "#SBATCH" in line]
    script = rendered(**{"partition": "p", "account": "a", name: text})
    assert [line.partition("=")[0] for line in script.splitlines() if line.startswith("#SBATCH")] == plain


@pytest.mark.parametrize("text", TWO_LINES)
@pytest.mark.parametrize(
    "name", ["name", "config", "run", "folder", "python", "container", "partition", "account", "mpirun"]
)
def test_several_lines_are_refused(name, text):
    assert rendered(**{name: text, **({"launcher": "mpirun"} if name == "mpirun" else {})}) is None


@pytest.mark.parametrize("text", TWO_LINES)
def test_several_lines_are_refused_in_lists(text):
    assert rendered(overrides=[text]) is None
    assert rendered(modules=[text]) is None
    assert rendered(environment={"A": text}) is None
    assert rendered(environment={text: "a"}) is None
    assert rendered(data=text, stage="/tmp") is None and rendered(stage=f"/{text}") is None
    assert rendered("sweep", settings=[[f"a={text}"]]) is None
    assert rendered(mpi=text) is None and rendered(time=text) is None
    for parse in (parse_directives, parse_environment, parse_sweep):
        with pytest.raises(UserError, match="expected"):
            parse([f"a={text}"])


test_names_of_variables_are_checked = refusals(
    *(
        ([f"{name}=1"], "--env: expected a name of letters")
        for name in ("A B", "A;touch PWNED", "1A", "A$(x)", "A'", "Ä")
    ),
    *(([text], f"--env: expected KEY=VALUE, such as NCCL_DEBUG=INFO, got '{text}'") for text in ("=1", "A")),
    call=parse_environment,
    error=UserError,
    literal=True,
)
test_names_of_directives_are_checked = refusals(
    *(([f"{key}=1"], "--sbatch") for key in ("mem\n", "Mem", "mem x", "", "-", "$(id)", "mem;x")),
    call=parse_directives,
    error=UserError,
    literal=True,
)


def test_every_output_of_a_template_is_quoted():
    """Each value in a template goes through `quoting.word`, or through a filter that is listed here."""
    environment = scripts._environment()
    assert environment.finalize is quoting.word
    for name in environment.list_templates():
        source, _, _ = environment.loader.get_source(environment, name)
        for value in re.findall(r"{{(.*?)}}", source):
            used = re.findall(r"\|\s*(\w+)", value)
            assert set(used) <= {"directives", "folder", "words", "raw", "length"}, (name, value)
            if "raw" in used:
                assert value.split("|")[0].strip() in ("key", "profile_script", "train_script")
