"""Errors in options of every command: one line with the option, the expected and the given value."""

import pytest

from halograd.cli.options import parse_grid, parse_ranks
from halograd.errors import UserError
from tests.cli.test_planning import LASSEN, SMALL
from tests.support.refusals import refusals

TINY = ("profile", "mesh", "--option", "resolution=16", "--option", "widths=[4, 4]", "--kernels", "numpy")
BENCH = ("bench", "allreduce")

WRONG = [
    (("plan", "mesh_3k", *LASSEN), "got 'mesh_3k'; did you mean mesh_2k"),
    (("plan", *SMALL, "--machine", "lasen", "--ranks", 2, "--batch", 1), "got 'lasen'; did you mean lassen?"),
    (
        ("plan", *SMALL, "--machine", "no.toml", "--ranks", 2, "--batch", 1),
        "machine no.toml: expected a TOML file to read",
    ),
    (("plan", *SMALL, *LASSEN, "--memory", "16"), '--memory: expected a size with its unit, such as "16 GiB", got'),
    (("plan", *SMALL, *LASSEN, "--memory", "1kB"), "too much; use more ranks, a smaller batch than 2"),
    (("plan", *SMALL, *LASSEN, "--planner", "eliminate"), "got 'eliminate'; did you mean elimination?"),
    (("plan", *SMALL, *LASSEN, "--optimizer", "adamv"), "--optimizer: expected one of sgd, adam, adamw, lion, "),
    (("plan", *SMALL, *LASSEN, "--optimizer", "adamv"), "got 'adamv'; did you mean adam?"),
    (("predict", *SMALL, *LASSEN, "--optimizer", "x"), "--optimizer: expected one of sgd, adam, adamw, lion, "),
    (("plan", *SMALL, *LASSEN, "--dtype", "float8"), "--dtype: expected one of float16, float32"),
    (("plan", *SMALL, *LASSEN, "--option", "colour=1"), "model.colour: unknown key; expected one of"),
    (("plan", *SMALL, *LASSEN, "--option", "colour"), "--option: expected KEY=VALUE"),
    (("plan", *SMALL, *LASSEN[:4], "--batch", 0), "--batch: expected a whole number >= 1, got 0"),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", "many", "--batch", 1), "Invalid value for '--ranks'"),
    (
        ("plan", *SMALL, *LASSEN, "-o", "no/such/plan.json"),
        "--out no/such/plan.json: expected a path that can be written",
    ),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "x", "--batch", 1), "--ranks: expected whole numbers"),
    (("predict", *SMALL, *LASSEN, "--grid", "height=3"), "3 ranks, which does not divide --ranks 8"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=2,height=2"), "choose parts whose product is 8"),
    (("predict", *SMALL, *LASSEN, "--grid", "depth=8"), "'depth' is cut, but the samples of 'mesh' have only the axes"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=8"), "8 parts along 'sample', but the batch has 2; use at most 2"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=2", "--planner", "data"), "--grid: expected no --planner with it"),
    (("predict", *SMALL, *LASSEN, "--plot", "x.png"), "--plot: expected several numbers of ranks"),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "2,3", "--batch", 3), "use a multiple of 2"),
    (("plan", *SMALL, *LASSEN, "--memory", "0 B"), "--memory: expected a number >= 1, got 0"),
    (("plan", *SMALL, *LASSEN, "--memory", "1e400 GB"), "--memory: expected a size with its unit"),
    (("plan", *SMALL, *LASSEN, "--planner", "x" * 3000), "--planner: expected shortest_path"),
    (("plan", *SMALL, *LASSEN, "--option", "convs=-1"), "model.convs: expected a whole number >= 1, got -1"),
    (("plan", *SMALL, *LASSEN, "--option", "convs=" + "9" * 5000), "--option convs: expected a TOML value, got '99999"),
    (("plan", *SMALL, *LASSEN, "--option", "widths=" + "[" * 3000), "--option widths: expected a TOML value, got '[[["),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", 8193, "--batch", 1), "--ranks: expected a whole number <= 819"),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", 2, "--batch", 2**31), "--batch: expected a whole number <= 2"),
    (("plan", *SMALL, "--machine", "x" * 300 + ".toml", "--ranks", 2, "--batch", 1), "(File name too long); check"),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "9" * 5000, "--batch", 1), "--ranks: expected whole num"),
    (
        ("predict", *SMALL, "--machine", "lassen", "--ranks", "1,2,...,\u00b2", "--batch", 1),
        "expected two numbers before",
    ),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=\u00b2"), "--grid: expected AXIS=PARTS,..."),
    (("evaluate", "x" * 300), "got xxx"),
    (("generate", "mesh-tangling", "o.h5", "--seed", 10**40), "seed: expected 0 to 9223372036854775807, got 1"),
    (("data", "join", "no.h5"), "no.h5: no such file"),
    (("data", "join", __file__), "expected an HDF5 file, got something else"),
    (("data", "repack", "no.h5", "b.h5", "--chunk", "a=1"), "no.h5: no such file"),
    (("explain", "no.json"), "plan no.json: expected a JSON file to read"),
    ((*TINY, "--option", "depth"), "--option: expected KEY=VALUE, such as resolution=512, got 'depth'"),
    ((*TINY, "--option", "colour=3"), "model.colour: unknown key; expected one of"),
    (("profile", "mash"), "model.name: expected one of"),
    ((*TINY, "--batch", "0"), "--batch: expected a whole number >= 1, got 0"),
    ((*TINY, "--budget", "-1"), "--budget: expected a number >= 0, got -1"),
    ((*TINY, "--transport", "pigeon"), "transport: expected auto, mpi, shared"),
    ((*TINY, "--kernels", "abacus"), "--kernels: expected auto, numpy"),
    ((*TINY, "--dtype", "float16"), 'got "float16": NumPy has only arithmetic of 32 and 64 bits'),
    ((*TINY, "--out", "no/such/folder/machine.toml"), "expected a path that can be written"),
    ((*BENCH, "--size", "large"), "--size: expected a size of at least 4 bytes, such as 256KiB or 4MiB, got 'large'"),
    ((*BENCH, "--size", "2B"), "--size: expected a size of at least 4 bytes"),
    ((*BENCH, "--method", "luck"), "--method: expected one of allreduce, ordered, reduce_scatter"),
    ((*BENCH, "--codec", "luck"), '--codec: expected float32, bfloat16, or "FILE.py:CLASS", got '),
    ((*BENCH, "--transport", "pigeon"), "--transport: expected auto, mpi, shared"),
    (("--bogus",), "No such option: --bogus; see `halograd --help`"),
    (("moon",), "No such command 'moon'; see `halograd --help`"),
    (("generate",), "Missing command; see `halograd generate --help`"),
    (("generate", "mesh-tangling", "x.h5", "--resolution", "big"), "Invalid value for '--resolution'"),
    (("generate", "mesh-tangling", "no/x.h5", "--resolution", "64"), "no does not exist; make it first"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(map(str, a))[-40:] for a, _ in WRONG])
def test_mistakes_are_one_line(typed, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path))
    code, out, err = typed(*arguments)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1 and err.startswith("halograd: error: ") and message in err, err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16", [16]), ("4,8,...,64", [4, 8, 16, 32, 64]), ("1, 3, ..., 27", [1, 3, 9, 27]), ("2,4,...,8", [2, 4, 8])],
)
def test_ranks(text, expected):
    assert parse_ranks(text) == expected


test_ranks_that_are_refused = refusals(
    ("four", "expected whole numbers >= 1 such as 4,8,...,2048, got 'four'"),
    ("4,0", "got '0' in '4,0'"),
    ("", "got '' in ''"),
    ("8,4", "expected rising numbers"),
    ("...,8", "expected two numbers before ... and one after"),
    ("4,...,8", "expected two numbers before ... and one after"),
    ("4,8,...", "expected two numbers before ... and one after"),
    ("4,6,...,32", "expected two numbers before ... and one after"),
    ("4,8,...,100", "expected 100 to be reached by times 2 from 8, got '4,8,...,100'; end with 128 or 64"),
    call=parse_ranks,
    error=UserError,
    literal=True,
)


test_grids_that_are_refused = refusals(
    ("sample", "expected AXIS=PARTS"),
    ("sample=two", "expected AXIS=PARTS"),
    ("sample=0", "expected AXIS=PARTS"),
    ("column=2", "expected axes out of sample, depth"),
    ("height=2,height=2", "expected every axis once"),
    call=parse_grid,
    error=UserError,
    literal=True,
)
