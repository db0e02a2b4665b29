"""Rehearsal of the first half hour on borrowed machines: all parts with stubs of their jobs, in three calls of nine
minutes, each on a new machine, of which two are taken back at a random time. Time runs `FASTER` times as fast.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys

from tests.gpu.parts import PARTS
from tests.gpu.results import Results
from tests.gpu.runner import ROOT
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until

FASTER = 150.0
#: A job of three checks that take a part of its limit; some crash, some take longer than the limit.
STUB = """
import json, os, random, sys, time
name, limit = sys.argv[1], float(sys.argv[2])
known = json.load(open(os.environ["HALOGRAD_GPU_SKIP"]))
for i in range(3):
    check, draw = f"{name} {i}", random.Random(f"{name} {i}")
    if check in known:
        continue
    print(json.dumps({"begin": check}), flush=True)
    kind = draw.random()
    time.sleep(limit * (2.0 if kind > 0.98 else 0.25 * draw.random()))
    if kind < 0.03:
        os.abort()
    print(json.dumps({"check": check, "status": "ok"}), flush=True)
"""
CALL = """
import sys
from dataclasses import replace
from tests.gpu import command, runner
from tests.gpu.parts import PARTS
seconds = float(sys.argv[1])
runner.LEAST_SECONDS = 0.05
runner.MOST_LINES = 0
def stub(part, job):
    name = f"{part.name}, {job.name}"
    limit = job.seconds / seconds
    return replace(job, module="stub", arguments=(name, str(limit)), ranks=0, seconds=limit)
parts = [replace(p, jobs=tuple(stub(p, job) for job in p.jobs)) for p in PARTS]
facts = {"devices": [{"name": "stub"}]}
command._facts = lambda results: results.write(facts=facts) or facts
command._first_gpu = lambda: "GPU 0: stub"
command.missing = lambda found: []
command.lacking = lambda: []
command.slowness = lambda: 1.0
sys.exit(command.main([*sys.argv[2:], "--seconds", str(command.SECONDS / seconds)], parts))
"""


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def test_killed_at_random_times_it_fits_and_keeps_everything(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    draw, mark, seen = random.Random(1), jobs.new_mark(), {}
    env = jobs.job_environment(mark, {"PYTHONPATH": f"{ROOT}:{tmp_path}", "TMPDIR": str(tmp_path)})
    folder = None
    for turn in range(3):
        out = tmp_path / f"out {turn}"
        resume = [] if folder is None else ["--resume", str(folder)]
        process = subprocess.Popen(
            [sys.executable, "-c", CALL, str(FASTER), "--out", str(out), *resume], cwd=ROOT, env=env
        )
        if turn < 2:
            path, size = out / "gpu-check.jsonl", (folder / "gpu-check.jsonl").stat().st_size if folder else 0
            enough = size + draw.randrange(500, 12_000)
            wait_until(lambda: process.poll() is not None or size_of(path) >= enough, "some results")  # noqa: B023
            process.kill()
        assert process.wait(LIMIT) in (0, 1, 3, -signal.SIGKILL)
        assert not jobs.await_end(mark), "no job outlives its call"
        events = [json.loads(line) for line in (out / "gpu-check.jsonl").read_text().splitlines() if line.endswith("}")]
        found = {(e["part"], e["job"], e["check"]): e["status"] for e in events if "check" in e}
        assert seen.items() <= found.items(), "what was found is kept, and is not run again"
        seen, folder = found, out
    reached = list(dict.fromkeys(r.part for r in Results(out / "gpu-check.jsonl").all() if r.part != "gpu"))
    # How many depends on the load of this machine; on an idle one it is all of HALF_HOUR and more.
    assert reached == [p.name for p in PARTS][: len(reached)] and reached, "in the order of value"
