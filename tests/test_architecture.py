"""Architecture rules: imports between folders, file sizes, and no machine-specific text in the sources."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import halograd
from halograd.comm.codec import CODECS
from halograd.comm.gpu import DEVICE_TRANSPORTS
from halograd.comm.transport import TRANSPORTS
from halograd.layers.reduction_scheme import NAMES

ROOT = Path(__file__).resolve().parent.parent

# Folders that each folder may import. `halograd/` itself is on top and may import all of them.
BELOW: dict[str, set[str]] = {
    "device": set(),
    "comm": {"device"},
    "kernels": {"device"},
    "dtensor": {"device", "comm", "kernels"},
    "lowering": {"device", "comm", "kernels", "dtensor"},
    "layers": {"device", "comm", "kernels", "dtensor", "lowering"},
    "program": {"device", "comm", "kernels", "dtensor", "lowering", "layers"},
    "models": {"device", "comm", "kernels", "dtensor", "layers", "data", "interchange"},
    "data": {"device", "comm", "kernels", "dtensor", "layers"},
    "perfmodel": {"device", "comm", "kernels", "dtensor", "lowering", "layers", "program", "models"},
    "interchange": {"device", "comm", "kernels", "dtensor", "layers", "data"},
    "training": {
        *("device", "comm", "kernels", "dtensor", "lowering", "layers", "program", "models", "data", "perfmodel"),
        "interchange",
    },
    "jobs": {"perfmodel", "models"},
}
# Types passed to a folder from above: they may be named in annotations, and are never imported at run time.
HANDED_DOWN = {"layers": {f"halograd.program.{name}" for name in ("context", "operations", "views")}}
# Modules of `halograd/` that are below all folders.
FOR_ALL = {"documents", "errors", "limits", "registry", "schema", "signatures", "user_code", "version"}

# All other files are arithmetic or use `comm` and `kernels`, and are tested without MPI and without a GPU.
MAY_IMPORT = {
    "mpi4py": ("comm/", "halograd/testing.py", "halograd/findings.py", "halograd/cli/"),
    "cupy": ("comm/gpu/", "kernels/cudnn/", "kernels/cuda/", "device/", "halograd/cli/"),
    "torch": (),
    "jax": (),
}
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

# Tests of time use a simulated clock (tests/support/clock.py), counted calls, or an order of events; limits against
# deadlock come from tests/harness/limits.py. These files may read or sleep on a clock:
CLOCKS = {"monotonic", "perf_counter", "process_time", "sleep", "thread_time", "time"}
MAY_READ_CLOCKS = {
    "tests/gpu/command.py": "limit of a call",
    "tests/gpu/recording.py": "what checks took",
    "tests/gpu/runner.py": "limits of processes",
    "tests/harness/": "limits, and polling up to them",
    "tests/launch.py": "looks for shared memory now and then",
    "tests/run_suite.py": "limits of runs, and what they took",
    "tests/test_run_suite.py": "hands out a clock that the test drives",
    "tests/support/": "clocks to be driven, doubles that poll another process",
    "tests/comm/test_channel.py": "ranks fall out of step; spans lie between two readings, however far apart",
    "tests/comm/test_progress.py": "a sleep is never too short",
    "tests/comm/test_sweep.py": "ages of files",
    "tests/benchmarks/test_gradient_reduction.py": "a host that sleeps too long",
    "tests/jobs/private_slurm.py": "polls Slurm up to a limit",
    "tests/training/fuzz_hdf5.py": "a program with a limit for each case",
    "tests/training/test_directory.py": "ages of files",
    "tests/training/test_survival.py": "a job is suspended for longer than a limit of the library",
}

# The brackets keep these lines from matching themselves.
MACHINE_PATH = re.compile(r"/(wor[k]|far[m]|roo[t]|hom[e]/[a-z]+|User[s]/[a-z]+)/")
INDEX_HOST = re.compile(r"pyp[i]\.org|pythonhoste[d]\.org|download\.pytorc[h]\.org|anacond[a]\.org")


def sources(*folders: str) -> list[Path]:
    """Return the Python files of these folders, by path."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def library() -> list[Path]:
    """Return the Python files of the installed package."""
    return sources("halograd", *BELOW)


def name(path: Path) -> str:
    """Return the path from the root of the repository, for messages and test ids."""
    return path.relative_to(ROOT).as_posix()


def package(path: Path) -> list[str]:
    """Return the dotted name of a file's package, as a list: ``dtensor/box.py`` is in ``halograd.dtensor``."""
    parts = list(path.relative_to(ROOT).parent.parts)
    return parts if parts[0] == "halograd" else ["halograd", *parts]


@cache
def imports(path: Path, text: str | None = None) -> list[tuple[int, str]]:
    """Return line and dotted name of all imports of a file at any depth, with relative imports resolved."""
    tree, found = ast.parse(path.read_text(encoding="utf-8") if text is None else text), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package(path)[: len(package(path)) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def typed_only(path: Path, text: str | None = None) -> set[int]:
    """Return the lines below ``if TYPE_CHECKING:``."""
    tree = ast.parse(path.read_text(encoding="utf-8") if text is None else text)
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {line for block in blocks for line in range(block.lineno + 1, (block.body[-1].end_lineno or 0) + 1)}


def upward(path: Path, text: str | None = None) -> list[str]:
    """Return the imports of a file from folders that its own folder must not use."""
    folder = package(path)[1] if len(package(path)) > 1 else ""
    if folder not in BELOW:
        return []
    allowed = BELOW[folder] | {folder} | FOR_ALL
    found = []
    for line, imported in imports(path, text):
        parts = imported.split(".")
        if parts[0] == "halograd" and (len(parts) == 1 or parts[1] not in allowed):
            found.append(f"{name(path)}:{line} imports {imported}")
    return found


def test_imports_point_one_way():
    found = [line for path in library() for line in upward(path)]
    assert not found, "expected imports to point down (see BELOW in this file), got\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text", "bad"),
    [
        ("comm/sums.py", "from halograd.dtensor import Box", True),
        ("comm/sums.py", "def f():\n    from ..layers.layer import Layer", True),
        ("comm/sums.py", "import halograd", True),
        ("comm/sums.py", "from halograd import testing", True),
        ("comm/sums.py", "from halograd.errors import UserError", False),
        ("comm/sums.py", "from .errors import CommError", False),
        ("kernels/numpy/conv.py", "from ...dtensor import Box", True),
        ("kernels/numpy/conv.py", "from ..errors import KernelError", False),
        ("layers/layer.py", "from halograd.kernels import Backend\nimport numpy", False),
        ("layers/layer.py", "from halograd.training.executor import Executor", True),
        ("layers/layer.py", "from halograd.lowering.context import Context", False),
        ("layers/layer.py", "if TYPE_CHECKING:\n    from halograd.program.program import Target", True),
        ("halograd/testing.py", "from halograd.training import Executor", False),
    ],
)
def test_the_check_of_imports_sees_all_forms(path, text, bad):
    assert bool(upward(ROOT / path, text)) is bad


def module_of(path: Path) -> str:
    """Return the dotted name of a file's module."""
    return ".".join(package(path) + ([] if path.stem == "__init__" else [path.stem]))


#: Times of an import: when the module is loaded, in a function that runs later, or only for a type checker.
WHEN = ("load", "call", "typing")


def import_lines(tree: ast.AST, when: str = "load") -> Iterator[tuple[int, str]]:
    """Yield the line of every import of a tree, and when it is executed."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node.lineno, when
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from import_lines(ast.Module(node.body, []), "typing")
            yield from import_lines(ast.Module(node.orelse, []), when)
        else:
            later = when == "load" and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from import_lines(node, "call" if later else when)


@cache
def graph_of_imports(sources: tuple[tuple[Path, str], ...]) -> dict[str, dict[str, tuple[str, int]]]:
    """Return, for each of these modules, the others that it imports, with the earliest time in `WHEN` and the line.

    A package imports its modules only if its ``__init__.py`` does so explicitly.
    """
    modules = {module_of(path) for path, _ in sources}
    graph: dict[str, dict[str, tuple[str, int]]] = {}
    for path, text in sources:
        moments, found = dict(import_lines(ast.parse(text))), graph.setdefault(module_of(path), {})
        for line, imported in sorted(imports(path, text), key=lambda one: (WHEN.index(moments[one[0]]), one[0])):
            target = imported if imported in modules else imported.rpartition(".")[0]
            if target in modules:
                found.setdefault(target, (moments[line], line))
    return graph


def cycles(graph: dict[str, dict[str, tuple[str, int]]], mode: str) -> list[list[str]]:
    """Return import cycles as lines of text; [] if there are none.

    Each cycle is a shortest one through a module that no other cycle contains. `mode` is the last of the times in
    `WHEN` whose imports count.
    """
    counted, named, found = WHEN[: WHEN.index(mode) + 1], set(), []
    for first in sorted(graph):
        way = [] if first in named else _way_back(graph, first, counted)
        if way:
            named |= set(way)
            found.append([f"{a}:{graph[a][b][1]} imports {b} ({graph[a][b][0]})" for a, b in itertools.pairwise(way)])
    return found


def _way_back(graph: dict[str, dict[str, tuple[str, int]]], first: str, counted: tuple[str, ...]) -> list[str]:
    """Return modules from `first` to itself, each of which imports the next; [] if there is no such cycle."""
    ways, known = deque([[first]]), {first}
    while ways:
        way = ways.popleft()
        for target, (when, _) in sorted(graph[way[-1]].items()):
            if when in counted and target == first:
                return [*way, first]
            if when in counted and target not in known:
                known.add(target)
                ways.append([*way, target])
    return []


@pytest.mark.parametrize("mode", WHEN)
def test_no_modules_import_each_other(mode):
    """Modules have no import cycles when they are loaded, in functions, or for a type checker."""
    read = tuple((path, path.read_text(encoding="utf-8")) for path in library())
    found = ["\n".join(lines) for lines in cycles(graph_of_imports(read), mode)]
    assert not found, "expected no import cycle; move below what modules share. Got\n" + "\n\n".join(found)


TYPED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "


@pytest.mark.parametrize(
    ("texts", "modes"),
    [
        ({"comm/a.py": "from .b import x", "comm/b.py": "from . import a"}, WHEN),
        ({"comm/a.py": "from .b import x", "comm/b.py": "def f():\n    from .a import y"}, WHEN[1:]),
        (
            {"comm/a.py": "from .b import x", "comm/b.py": "class C:\n    def f(self):\n        from . import a"},
            WHEN[1:],
        ),
        ({"comm/a.py": "from .b import x", "comm/b.py": f"{TYPED}from .a import y"}, WHEN[2:]),
        ({"comm/a.py": f"{TYPED}from .b import x", "comm/b.py": "def f():\n    import halograd.comm.a"}, WHEN[2:]),
        (
            {
                "comm/a.py": "from .b import x",
                "comm/b.py": "from ..data import z",
                "data/__init__.py": "from ..comm.a import y",
            },
            WHEN,
        ),
        ({"comm/__init__.py": "from .a import y", "comm/a.py": "def f():\n    from ..comm import y"}, WHEN[1:]),
        ({"comm/__init__.py": "from .a import y", "comm/a.py": "from .b import x", "comm/b.py": "import os"}, ()),
        ({"comm/a.py": "from .b import x\nfrom .c import z", "comm/b.py": "from .c import z", "comm/c.py": ""}, ()),
    ],
)
def test_the_check_of_cycles_sees_all_forms(texts, modes):
    graph = graph_of_imports(tuple((ROOT / path, text) for path, text in texts.items()))
    assert tuple(mode for mode in WHEN if cycles(graph, mode)) == tuple(modes)


def test_a_cycle_is_named_from_line_to_line():
    texts = {
        "comm/a.py": "import os\nfrom .b import x",
        "comm/b.py": "def f():\n    from .c import y",
        "comm/c.py": "from . import a",
    }
    made = tuple((ROOT / path, text) for path, text in texts.items())
    assert cycles(graph_of_imports(made), "typing") == [
        [
            "halograd.comm.a:2 imports halograd.comm.b (load)",
            "halograd.comm.b:2 imports halograd.comm.c (call)",
            "halograd.comm.c:1 imports halograd.comm.a (load)",
        ]
    ]


def test_only_commands_import_the_command_line():
    below = [path for path in library() if not name(path).startswith(("halograd/cli/", "halograd/__main__.py"))]
    assert name(ROOT / "halograd/auto.py") in map(name, below)
    cli = "halograd.cli."
    found = [f"{name(path)}:{line}" for path in below for line, n in imports(path) if f"{n}.".startswith(cli)]
    assert not found, f"expected texts and other shared things beside halograd/cli/, got imports of it in {found}"


@pytest.mark.parametrize("module", MAY_IMPORT)
def test_only_some_files_may_import(module):
    found = [
        f"{name(path)}:{line}"
        for path in library()
        if not name(path).startswith(MAY_IMPORT[module])
        for line, imported in imports(path)
        if imported.split(".")[0] == module
    ]
    assert not found, f"expected {module} to be imported in {MAY_IMPORT[module]} only, got {found}"


def test_no_pickle():
    found = []
    for path in [*library(), *sources("benchmarks", "examples")]:
        found += [f"{name(path)}:{line}" for line, imported in imports(path) if imported.split(".")[0] in PICKLERS]
        if "allow_pickle=True" in path.read_text(encoding="utf-8"):
            found.append(name(path))
    assert not found, f"expected no pickle anywhere, got {found}"


def clock_readings(path: Path, text: str | None = None) -> list[str]:
    """Return the lines of a file that read a clock of the machine, sleep on it, or set a time limit."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if text is None else text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
            if node.attr in CLOCKS:
                found.append(f"{name(path)}:{node.lineno} time.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"{name(path)}:{node.lineno} {a.name}" for a in node.names if a.name in CLOCKS]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            limits = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            limits += node.args[:1] if node.func.attr in ("wait", "join") else []
            numbers = [limit.value for limit in limits if isinstance(limit, ast.Constant)]
            found += [f"{name(path)}:{node.lineno} a limit of {n} s" for n in numbers if type(n) in (int, float)]
    return found


def test_no_verdict_of_a_test_hangs_on_a_clock():
    tests = [path for path in sources("tests") if not name(path).startswith(tuple(MAY_READ_CLOCKS))]
    found = [line for path in tests for line in clock_readings(path)]
    assert not found, "expected driven clocks, and limits of tests.harness.limits, got\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("begin = time.perf_counter()", True),
        ("from time import monotonic", True),
        ("process.communicate(timeout=30)", True),
        ("process.wait(30)", True),
        ("thread.join(5.0)", True),
        ("process.communicate(timeout=LIMIT)", False),
        ("clock.sleep(3)", False),
        ("'/'.join(parts)", False),
    ],
)
def test_the_check_of_clocks_sees_all_forms(text, bad):
    assert bool(clock_readings(ROOT / "tests" / "test_it.py", text)) is bad


def test_no_file_over_800_lines():
    files = [*library(), *sources("tests", "benchmarks", "examples", "docs")]
    long = {name(path): n for path in files if (n := len(path.read_text(encoding="utf-8").splitlines())) > 800}
    assert not long, f"expected at most 800 lines per file, got {long}; split by concept"


def oversized(path: Path, text: str | None = None) -> list[str]:
    """Return functions of a file with more than 8 parameters, and classes with more than 25 methods."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8") if text is None else text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls")]) + bool(given.vararg) + bool(given.kwarg)
            found += [f"{name(path)}:{node.lineno} {node.name}: {count} parameters"] if count > 8 else []
        elif isinstance(node, ast.ClassDef):
            count = sum(isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in node.body)
            found += [f"{name(path)}:{node.lineno} {node.name}: {count} methods"] if count > 25 else []
    return found


def test_functions_and_classes_are_no_larger_than_a_reader_can_hold():
    """Functions have at most 8 parameters and classes at most 25 methods; options of commands are grouped."""
    files = [path for path in sources("halograd", "jobs", "perfmodel") if path.name != "testing.py"]
    found = [line for path in files for line in oversized(path)]
    assert not found, "expected at most 8 parameters and 25 methods, got\n" + "\n".join(found)
    nine = ", ".join(f"a{i}" for i in range(9))
    assert oversized(files[0], f"def f({nine}): pass\nclass C:\n" + "    def f(self): pass\n" * 26)


def test_what_a_module_offers_is_there():
    for path in library():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bound = {
            alias.asname or alias.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for alias in n.names
        }
        bound |= {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        bound |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        offered = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__"]
        missing = set(ast.literal_eval(offered[0])) - bound if offered and "__getattr__" not in bound else set()
        assert not missing, f"{name(path)}: {missing}"


def test_folders_import_each_other_relatively():
    """Folders use relative imports, so tools see the same imports in ``comm/sums.py`` and ``halograd/comm/sums.py``."""
    absolute = re.compile(rf"^\s*(?:from|import) halograd\.({'|'.join(BELOW)})\b", re.MULTILINE)
    found = [name(path) for path in library() if absolute.search(path.read_text(encoding="utf-8"))]
    assert not found, f"expected relative imports, as `from ..comm import`, got absolute ones in {found}"


# Where a name of a codec, transport or scheme is compared although the file is not its own.
MAY_COMPARE_NAMES = {
    "perfmodel/machine.py": "machine files of earlier versions say in a note what carries a link",
}
OWN_NAMES = {"comm/codec.py", "comm/transport.py", "comm/gpu/choice.py", "layers/reduction_scheme.py"}
# Names that are words of other things, too: they count where what they are compared with says so.
AMBIGUOUS = {"auto", "float32", "bfloat16"}
SAYS = re.compile(r"transport|payload|codec|scheme|reduction|\broute\b|\bchoice\b", re.I)


def registered() -> set[str]:
    return {*CODECS.names, *TRANSPORTS.names, *DEVICE_TRANSPORTS.names, *NAMES}


def literals(node: ast.expr) -> list[str]:
    """Return the texts in an operand of a comparison, or in an argument of `startswith`."""
    parts = node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else [node]
    return [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def compared_names(text: str) -> list[tuple[int, str]]:
    """Return lines and names of comparisons (``==``, ``in``, `startswith`, ``case``) with names of codecs etc."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "startswith":
            sides = [node.func.value, *node.args]
        elif isinstance(node, ast.Match):
            patterns = [part for case in node.cases for part in ast.walk(case.pattern)]
            sides = [node.subject, *(part.value for part in patterns if isinstance(part, ast.MatchValue))]
        else:
            continue
        others = " ".join(ast.unparse(side) for side in sides if not literals(side))
        for word in (word for side in sides for word in literals(side)):
            is_name = word.partition(":")[0] in registered()
            if is_name and (word.partition(":")[0] not in AMBIGUOUS or SAYS.search(others)):
                found.append((node.subject.lineno if isinstance(node, ast.Match) else node.lineno, word))
    return found


def test_no_other_file_compares_names_of_codecs_transports_or_schemes():
    """Only the files that define codecs, transports and schemes compare their names; others read properties."""
    found = {
        name(path): [f"{name(path)}:{line} {word!r}" for line, word in compared_names(path.read_text(encoding="utf-8"))]
        for path in library()
        if name(path) not in OWN_NAMES
    }
    lines = [line for path, several in found.items() if path not in MAY_COMPARE_NAMES for line in several]
    assert not lines, "expected a property in place of the comparison of a name, got\n" + "\n".join(lines)
    assert all(found[path] for path in MAY_COMPARE_NAMES), "an exception that is none any more"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('comm.transport == "mpi"', True),
        ('"mpi" != transport', True),
        ('scheme.name in ("sharded", "hierarchical")', True),
        ('record.transport.startswith("emulated")', True),
        ('note.startswith(("shared", "auto"))', True),
        ('text.startswith("emulated:alpha=")', True),
        ('match scheme.name:\n    case "x" | "sharded":\n        pass', True),
        ('scheme.payload == "bfloat16"', True),
        ('config.reduction.name != "auto"', True),
        ('choice.name == "nccl"', True),
        ('dtype.name == "bfloat16"', False),
        ('halo == "auto"', False),
        ('"sharded" + name', False),
        ('Scheme("sharded")', False),
        ('kind.shards and name == "lars"', False),
    ],
)
def test_the_check_of_names_sees_all_forms(text, seen):
    assert bool(compared_names(text)) is seen


def test_one_class_has_a_name():
    homes: dict[str, list[str]] = {}
    for path in library():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name(path))
    several = {kind: files for kind, files in homes.items() if len(files) > 1}
    assert not several, f"expected one name for one thing, got {several}"


def test_every_folder_is_a_package_of_halograd():
    links = {path.name: os.readlink(path) for path in (ROOT / "halograd").iterdir() if path.is_symlink()}
    assert links == {folder: f"../{folder}" for folder in BELOW}
    bare = [name(p.parent) for p in library() if not (p.parent / "__init__.py").exists()]
    assert not bare, f"expected an __init__.py, without which nothing is installed, in {sorted(set(bare))}"


def test_static_tools_find_every_public_name():
    """Every public name of ``import halograd`` is also imported below ``if TYPE_CHECKING``, from its module."""
    path = ROOT / "halograd" / "__init__.py"
    annotations = typed_only(path)
    homes = {n.rpartition(".")[2]: n.rpartition(".")[0] for line, n in imports(path) if line in annotations}
    assert homes.pop("*") == homes.pop("layers") + ".layers" == "halograd.layers"
    assert not set(homes) & set(halograd.layers.__all__)
    homes |= dict.fromkeys(halograd.layers.__all__, "halograd.layers")
    assert set(homes) == set(halograd.__all__) - {"__version__"}
    for public, home in homes.items():
        assert getattr(halograd, public) is getattr(importlib.import_module(home), public), public


@pytest.mark.parametrize("pattern", [MACHINE_PATH, INDEX_HOST], ids=["machine path", "package index"])
def test_nothing_of_one_machine(pattern):
    files = [*library(), *sources("tests", "benchmarks", "examples")]
    files += [path for path in ROOT.glob("*") if path.is_file() and path.suffix in ("", ".md", ".toml", ".py", ".yml")]
    files = [path for path in files if path.name != ".git"]  # file of a worktree
    files += [p for folder in ("docs", ".ci", "examples") for p in (ROOT / folder).rglob("*") if p.is_file()]
    files = [path for path in files if path.suffix not in (".png", ".h5", ".pyc")]
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{name(path)}:{number} {line.strip()[:80]}")
    assert not found, "got\n" + "\n".join(found)


def test_the_page_of_the_architecture_names_every_file_of_the_library():
    """A name without a folder is in the folder named before it in its row; all names are of files that are there."""
    named: set[str] = set()
    for line in (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").splitlines():
        folder = ""
        for file in re.findall(r"`([\w./]+\.\w+|(?:\w+/)+)`", line):
            if "/" in file:
                folder = file.rpartition("/")[0]
            elif folder and file.endswith((".py", ".cu", ".cuh")):
                file = f"{folder}/{file}"
            named.add(file)
    assert {"program/runner.py", "kernels/", "kernels/numpy/windows.py"} <= named
    missing = sorted(path for path in named if "/" in path and not (ROOT / path).exists())
    assert not missing, f"expected files of this repository, got {missing}"
    unnamed = {name(path) for path in library() if path.name != "__init__.py"} - named
    assert not unnamed, f"expected the page to say what these files have, got no line with {sorted(unnamed)}"

