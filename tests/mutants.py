"""Mutants of data files: each must be read into a usable object, or raise a one-line error.

    python -m tests.mutants --count 1250 --first 0 configuration strategy plan machine

tries this number of mutants of every kind of file; the suite tries a few (tests/test_documents.py). Bytes are flipped,
tokens exchanged, and values of other types and sizes put anywhere. A mutant depends on its document and its number
alone, so that a fault can be reproduced.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from halograd.cli.run import run
from halograd.device import as_dtype
from halograd.errors import UserError
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import mesh
from halograd.perfmodel.cost import memory_of, program_of
from halograd.perfmodel.machine import FOLDER
from halograd.program.program import Target
from halograd.training.build import make_network, make_strategy
from halograd.training.config import load_config
from halograd.training.schedules import make_schedule

#: Written as they are, because no value of Python stands for them.
RAW = (
    "9" * 5000,
    "-" + "9" * 5000,
    "1e400",
    "-1e400",
    "nan",
    "NaN",
    "inf",
    "Infinity",
    "-inf",
    "0x" + "f" * 5000,
    "1979-05-27",
    "1979-05-27T07:32:00Z",
    "07:32:00",
    '"\\ud800"',
    '"\\u0000"',
    "null",
    "1_000",
    "'''x\ny'''",
    "[" * 20 + "]" * 20,
    "[" * 60 + "]" * 60,
    "[" * 2000 + "]" * 2000,
    "[" * 100_000 + "]" * 100_000,
    '{"a":' * 50 + "1" + "}" * 50,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "",
)
NUMBERS = (0, -1, 1, 2, 7, 64, 1000, 10**6, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30)
FRACTIONS = (0.0, -0.0, 0.5, 1.0, -1.5, 1e-9, 5e-324, 1e-300, 1e16, 1e30, 1e31, 1.7e308, -1.7e308)
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\u2028",
        "\ufeff",
        "é",
        "\U0001f600",
        "a.b.c",
        "..",
        "/",
        "{}",
        "%s%n",
    ),
    *("auto", "true", "4", "1e5", "-1", "nan", "1 s", "1e400 GB/s", "1" * 4000 + " a b", "x" * 3000, "$(id)", "'", '"'),
)


class _Raw(str):
    """Text that is written without quotes."""


def mutant(document: str, kind: str, number: int) -> bytes:
    """Return mutant `number` of a ``"toml"`` or ``"json"`` document."""
    draw = random.Random(f"{kind} {number} {len(document)}")
    if draw.random() < 0.2:
        return _flipped(document.encode(), draw)
    if draw.random() < 0.2:
        return _shuffled(document, draw).encode("utf-8", "surrogatepass")
    data = json.loads(document) if kind == "json" else _toml_tables(document)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = _changed(data, draw)
    text = _as_json(data) if kind == "json" else _as_toml(data)
    return text.encode("utf-8", "surrogatepass")


def _flipped(data: bytes, draw: random.Random) -> bytes:
    """Return the text with some bytes changed, removed or inserted."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 50))):
        place = draw.randrange(len(found))
        what = draw.randrange(4)
        if what == 0:
            found[place] ^= 1 << draw.randrange(8)
        elif what == 1:
            found[place] = draw.randrange(256)
        elif what == 2:
            del found[place : place + draw.choice((1, 1, 3, 200))]
        else:
            found[place:place] = draw.choice((b"\0", b"\xff", b"\n", b'"', b"{", b"]", b"\xef\xbb\xbf", b"e9", b"."))
        found = found or bytearray(b" ")
    return bytes(found[: draw.randrange(len(found))] if draw.random() < 0.1 else found)


def _shuffled(document: str, draw: random.Random) -> str:
    """Return the text with tokens swapped, removed, repeated or replaced."""
    tokens = re.findall(r"\w+|\s+|\"[^\"\n]*\"|.", document)
    for _ in range(draw.choice((1, 1, 2, 6))):
        a, b = draw.randrange(len(tokens)), draw.randrange(len(tokens))
        what = draw.randrange(4)
        if what == 0:
            tokens[a], tokens[b] = tokens[b], tokens[a]
        elif what == 1:
            tokens[a] = ""
        elif what == 2:
            tokens[a] += " " + tokens[a]
        else:
            tokens[a] = draw.choice(RAW)
    return "".join(tokens)


def _changed(data: Any, draw: random.Random) -> Any:
    """Return a copy of the document with one value or key changed."""
    data = copy.deepcopy(data)
    places = list(_places(data))
    if not places or draw.random() < 0.02:
        return draw.choice(([], {}, _odd(draw), [data], {"a": data}))
    table, key = draw.choice(places)
    change: Callable[[Any, Any, random.Random], None] = draw.choice((_replace, _replace, _nudge, _nudge, _rearrange))
    change(table, key, draw)
    return data


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


def _replace(table: Any, key: Any, draw: random.Random) -> None:
    table[key] = _odd(draw)


def _odd(draw: random.Random) -> Any:
    kind = draw.randrange(7)
    if kind == 0:
        return _Raw(draw.choice(RAW))
    some: Any = (True, False, None, [], {}, [[]], [0], ["a"], {"a": 1}, {"": ""}, [1, 2, 3, 4])
    return copy.deepcopy(draw.choice((NUMBERS, NUMBERS, FRACTIONS, TEXTS, TEXTS, some)[kind - 1]))


def _nudge(table: Any, key: Any, draw: random.Random) -> None:
    """Replace a value by another one of the same type, or by the same value as another type."""
    value = table[key]
    if isinstance(value, bool):
        table[key] = draw.choice((not value, int(value), str(value).lower()))
    elif isinstance(value, int | float) and not isinstance(value, _Raw):
        table[key] = draw.choice((-value, value + 1, value - 1, value * 10, value * 1e9, float(value), str(value)))
    elif isinstance(value, str):
        table[key] = draw.choice((value[:-1], value + "x", value.upper(), value + "\0", [value], value * 50, ""))
    elif isinstance(value, list):
        table[key] = draw.choice((value[:-1], value * 2, value[::-1], [value], [*value, None], [str(v) for v in value]))
    else:
        pairs = list(value.items()) if isinstance(value, dict) else 7
        table[key] = draw.choice((list(value or ()), pairs, {}, str(value)[:100]))


def _rearrange(table: Any, key: Any, draw: random.Random) -> None:
    """Remove, rename or repeat a key, or move an entry to another key."""
    value, what = table[key], draw.randrange(5)
    if what == 0 or isinstance(table, list):
        del table[key]
    elif what == 1:
        names = (
            key[:-1],
            key + "s",
            key.upper(),
            "",
            "\n",
            "a" * 500,
            "é",
            key + "\0",
            "__class__",
            "0",
            "model_fields",
        )
        table[draw.choice(names)] = table.pop(key)
    elif what == 2:
        table[_Raw(key)] = value  # written a second time; hash and equality are those of the text
        table["\0twice"] = (key, value)
    elif what == 3:
        table[key] = {key: value}
    else:
        other = draw.choice(list(table))
        table[key], table[other] = table[other], table[key]


def _toml_tables(document: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:
        import tomli as tomllib  # type: ignore[no-redef]
    return tomllib.loads(document)


def _as_json(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))}: {_as_json(v)}" for k, v in _pairs(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_json, value)) + "]"
    return str(value) if isinstance(value, _Raw) else json.dumps(value)


def _as_toml(data: Any) -> str:
    if not isinstance(data, dict):
        return _toml_value(data)
    plain = [f"{_toml_key(k)} = {_toml_value(v)}" for k, v in _pairs(data) if not _is_table(v)]
    tables = []
    for key, table in _pairs(data):
        if _is_table(table):
            tables += [f"[{_toml_key(key)}]", *(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in _pairs(table)), ""]
    return "\n".join([*plain, "", *tables])


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _pairs(table: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key, value in table.items():
        yield value if key == "\0twice" and isinstance(value, tuple) else (key, value)


def _toml_key(key: str) -> str:
    return str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(str(key))


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in _pairs(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, _Raw):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    return "null" if value is None else json.dumps(value)


#: Time limit for mutants that hang, on the slowest machine [s].
PATIENCE = 120
#: Largest number of ranks to compile for.
RANKS = 64

CONFIG = """
[model]
name = "mesh"
resolution = 32
channels = 2
widths = [4, 6]
convs = 1
decoder = true
pos_weight = 2.0
statistics = "global"
[data]
path = "data.h5"
validation = 0.3
prefetch = 2
rule = "majority"
transforms = {Pressure = "log"}
[strategy]
sample = 1
height = 2
halo = "overlap"
bucket_bytes = 512
[reduction]
name = "two_chunks"
first_layers = 2
payload = "bfloat16"
[optimizer]
kind = "adamw"
weight_decay = 0.01
epsilon = 1e-8
[schedule]
kind = "step"
learning_rate = 0.01
milestones = [1, 2.5]
warmup_epochs = 1
[training]
epochs = 3
batch = 4
seed = 7
clip_norm = 1.0
[backend]
kernels = "numpy"
threads = 1
device = [0, 1]
[output]
directory = "runs/a"
checkpoint_minutes = 20
[run]
stall_minutes = 15
"""
NETWORK = {"resolution": 16, "channels": 2, "widths": [4, 6], "convs": 1}
SMALL = ["mesh", *(word for key, value in NETWORK.items() for word in ("--option", f"{key}={value}"))]
STRATEGY = Strategy(
    {"sample": 2},
    {"conv1_1": {"height": 2, "width": 2, "halo": "pad"}, "conv2_1": {"channel": 2, "input_channel": 2}},
    {"statistics": "sample"},
    4096,
)


def built(network, strategy: Strategy, batch: int, size: int, dtype: str = "float32") -> None:
    """Build everything that a run computes before it allocates memory; raise UserError if the strategy does not fit."""
    strategy.validate(network, size)
    strategy.refuse_empty_blocks(network)
    if size <= RANKS:
        blocks = parameter_blocks(network, strategy, size)
        for rank in {0, size - 1}:
            program = program_of(network, strategy, Target(batch, size, rank, as_dtype(dtype)))
            memory_of(program, blocks)


def use_config(path: Path) -> None:
    config = load_config(path)
    network = make_network(config)
    schedule = make_schedule(config.schedule, config.training.epochs, 5)
    assert all(np.isfinite(schedule(step)) and schedule(step) >= 0 for step in (0, 7, 10**9))
    size = (config.strategy.sample or 1) * config.strategy.depth * config.strategy.height * config.strategy.width
    strategy = make_strategy(config.strategy, min(size, RANKS), network, config.training.batch)
    built(network, strategy, config.training.batch, strategy.ranks, config.training.dtype)


def use_strategy(path: Path) -> None:
    strategy = Strategy.load(path)
    built(mesh(**NETWORK), strategy, 4, strategy.ranks)


def use_plan(path: Path) -> None:
    command("explain", path)


def use_machine(path: Path) -> None:
    command("predict", *SMALL, "--machine", path, "--ranks", 4, "--batch", 2)
    command("plan", *SMALL, "--machine", path, "--ranks", 2, "--batch", 2)


def command(*arguments: object) -> None:
    """Run a command, and raise its one-line error as a UserError."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([str(argument) for argument in arguments])
    if code == 2:
        raise UserError(err.getvalue().removesuffix("\n"))
    assert code == 0 and err.getvalue() == "" and out.getvalue(), err.getvalue()


def _plan() -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(["plan", *SMALL, "--machine", "lassen", "--ranks", "4", "--batch", "2", "--json"]) == 0
    return out.getvalue()


def _strategy(folder: Path) -> str:
    STRATEGY.save(folder / "s.json")
    return (folder / "s.json").read_text()


KINDS = {
    "configuration": ("toml", lambda folder: CONFIG, use_config),
    "strategy": ("json", _strategy, use_strategy),
    "plan": ("json", lambda folder: _plan(), use_plan),
    "machine": ("toml", lambda folder: (FOLDER / "lassen.toml").read_text(encoding="utf-8"), use_machine),
}


@contextlib.contextmanager
def patience():
    """Raise TimeoutError if the body takes longer than PATIENCE."""

    def late(*_: object) -> None:
        raise TimeoutError(f"expected an end within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(use, path: Path) -> str:
    """Return "accepted", "refused", or the description of a fault."""
    try:
        with patience():
            use(path)
    except UserError as error:
        text = str(error)
        return "refused" if text.isprintable() and len(text) < 1500 else f"not one short line: {text[:500]!r}"
    except Exception:
        return traceback.format_exc()
    return "accepted"


def campaign(kind: str, numbers: Iterable[int], folder: Path) -> tuple[Counter[str], list[str]]:
    """Return the counts of the outcomes of the mutants with these numbers, and the faults."""
    form, document_of, use = KINDS[kind]
    document, path = document_of(folder), folder / f"mutant.{form}"
    path.write_text(document)
    found, faults = Counter[str](), list[str]()
    first = outcome(use, path)
    if first != "accepted":
        faults.append(f"the {kind} itself: {first}")
    for number in numbers:
        path.write_bytes(mutant(document, form, number))
        told = outcome(use, path)
        sound = told in ("accepted", "refused")
        found[told if sound else "fault"] += 1
        if not sound:
            faults.append(f"{kind} {number}: {told}")
    return found, faults


def main() -> int:
    """Print the outcomes of the mutants, and every fault; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--count", type=int, default=1250)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for kind in given.kinds or KINDS:
            found, faults = campaign(kind, range(given.first, given.first + given.count), Path(folder))
            print(f"{kind}: {dict(found)}", *faults, sep="\n", flush=True)
            wrong += len(faults)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
