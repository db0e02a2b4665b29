"""Branch coverage of the library by all processes of a run of the suite, also by those that its tests start.

`coverage` starts in every process of Python whose environment names a configuration. A process that is killed leaves no
data.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

__all__ = ["configure", "report"]

VARIABLE = "COVERAGE_PROCESS_START"
#: Folders that are no library.
OTHERS = ("tests", "docs", "benchmarks", "examples", "site", "build", ".venv")
#: Files with less coverage are listed [%].
LOW = 85.0
COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")
CONFIGURATION = """\
[run]
branch = True
parallel = True
patch = _exit
source = {root}
omit =
{omitted}
data_file = {folder}/data
disable_warnings = no-data-collected, module-not-imported
"""


def configure(root: Path, folder: Path) -> dict[str, str]:
    """Write a configuration into a new folder; return the variables with which processes measure files below `root`."""
    folder.mkdir()
    omitted = "\n".join(f"    {root}/{name}" for name in (*(f"{other}/*" for other in OTHERS), "setup.py"))
    (folder / "coveragerc").write_text(CONFIGURATION.format(root=root, folder=folder, omitted=omitted))
    return {VARIABLE: str(folder / "coveragerc")}


def report(root: Path, folder: Path) -> Iterator[str]:
    """Yield lines: coverage [%] of statements and branches together per folder, in all, and of files below `LOW`."""
    from coverage import Coverage

    measured = Coverage(config_file=str(folder / "coveragerc"))
    measured.combine()
    # A test runs code under the names of pages, which have no such lines.
    measured.json_report(outfile=str(folder / "report.json"), ignore_errors=True)
    folders, low = dict[str, Counter[str]](), list[tuple[float, Path]]()
    for name, entry in json.loads((folder / "report.json").read_text())["files"].items():
        path = Path.cwd().joinpath(name).relative_to(root)
        for key in (path.parts[0], "all"):
            folders.setdefault(key, Counter()).update({k: entry["summary"][k] for k in COUNTS})
        low.append((both(entry["summary"]), path))
    yield f"{'coverage':>14} {'lines':>8} {'branches':>9} {'both':>7}"
    for key, total in sorted(folders.items(), key=lambda item: (item[0] == "all", item[0])):
        branches = share(total["covered_branches"], total["num_branches"])
        yield f"{key:>14} {total['num_statements']:>8} {branches:>8.1f}% {both(total):>6.1f}%"
    for percent, path in sorted(low):
        if percent < LOW:
            yield f"coverage of {path}: {percent:.1f}%"


def both(total: Mapping[str, int]) -> float:
    """Return the share of statements and branches that were executed [%]."""
    executed = total["covered_lines"] + total["covered_branches"]
    return share(executed, total["num_statements"] + total["num_branches"])


def share(executed: int, count: int) -> float:
    """Return the share [%] of an executed number; 100 of none."""
    return 100 * executed / count if count else 100.0
