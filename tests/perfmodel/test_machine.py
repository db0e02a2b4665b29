"""Tests of machines: files and their units, links, stages, rooflines, and errors in one line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.errors import UserError
from halograd.perfmodel.machine import FOLDER, LEVELS, MACHINES, Efficiency, Link, Machine
from halograd.perfmodel.quantities import UNITS, format_quantity, parse_quantity

LASSEN = (FOLDER / "lassen.toml").read_text(encoding="utf-8")


def small(**changes: object) -> Machine:
    """Return a machine with two devices per node, three nodes per switch, and one distinct link per level."""
    links = {level: Link(alpha=10.0**i, beta=float(i)) for i, level in enumerate(LEVELS)}
    machine = Machine("small", "made up", 2, 3, {"float32": 1e9}, 1e8, 2**30, 1e-5, links)
    return dataclasses.replace(machine, **changes)


def test_shipped() -> None:
    assert MACHINES == ("cori-haswell", "cpu-core", "dgx-h100", "k80-node", "lassen", "p100-cluster")


@pytest.mark.parametrize("name", MACHINES)
def test_shipped_file(name: str, tmp_path: Path) -> None:
    machine = Machine.load(name)
    assert machine.name == name and machine.source and machine.device and "float32" in machine.peak_flops
    assert set(machine.links) == set(LEVELS)
    assert machine.links["node"].bandwidth <= machine.links["device"].bandwidth
    assert machine.links["across"].seconds(1e6) >= machine.links["switch"].seconds(1e6)
    machine.save(tmp_path / "copy.toml")
    assert Machine.load(tmp_path / "copy.toml") == machine
    assert hash(Machine.load(tmp_path / "copy.toml")) == hash(machine)


def test_published_numbers() -> None:
    """Shipped machines have the published values of Dryden, Section VI, BenchPress, and Jia, Section 6."""
    lassen = Machine.load("lassen")
    assert lassen.devices_per_node == 4 and lassen.memory == 16 * 2**30 and lassen.peak_flops["float32"] == 15.7e12
    assert lassen.links["across"] == Link(8.5e-6, 2.83e-10) and lassen.links["node"] == Link(8e-6, 2.661e-11)
    jia = Machine.load("p100-cluster")
    assert jia.devices_per_node == 4 and jia.links["switch"].bandwidth < 100e9 / 8
    assert Machine.load("k80-node").devices_per_node == 16


names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1)
positive = st.floats(min_value=1e-29, max_value=1e30)


@given(names, positive, positive, st.integers(1, 2**50), st.floats(0, 1e30), st.floats(0.01, 1), names)
def test_round_trip(
    text: str, alpha: float, beta: float, memory: int, half: float, fraction: float, dtype: str
) -> None:
    machine = small(
        name=text,
        source=text,
        memory=memory,
        memory_bandwidth=beta,
        launch=alpha,
        peak_flops={"float32": alpha, dtype: beta},
        links={level: Link(alpha, beta, text) for level in LEVELS},
        efficiency=Efficiency(fraction, half, fraction, fraction, fraction),
        rails=3,
    )
    again = Machine.parse(machine.to_toml())
    assert again == machine and again.links["node"].note == text


def test_level() -> None:
    machine = small()
    expected = ["device", "node", "switch", "switch", "switch", "switch", "across"]
    assert [machine.level(0, b) for b in range(7)] == expected
    assert machine.level(1, 2) == machine.level(2, 1) == "switch" and machine.level(5, 6) == "across"


@given(st.lists(st.integers(0, 40), max_size=8))
def test_span_and_stages_against_brute_force(ranks: list[int]) -> None:
    machine, members = small(), set(ranks)
    slowest = max((LEVELS.index(machine.level(a, b)) for a in members for b in members), default=0)
    assert machine.span(iter(ranks)) == LEVELS[slowest]
    stages = machine.stages(members)
    assert [stage.level for stage in stages] == [
        s.level for s in stages if s.size > 1 and s.link is machine.links[s.level]
    ]
    sizes = {stage.level: stage.size for stage in stages}
    nodes = {r // 2 for r in members}
    assert sizes.get("node", 1) == max((len([r for r in members if r // 2 == n]) for n in nodes), default=1)
    assert (
        sizes.get("switch", 1) == max((len([n for n in nodes if n // 3 == s]) for s in range(7)), default=1)
        or not nodes
    )
    assert sizes.get("across", 1) == max(1, len({n // 3 for n in nodes}))


def test_ranges_are_groups() -> None:
    machine = small()
    assert machine.span(range(0)) == machine.span(range(3, 4)) == "device"
    assert machine.span(range(0, 8, 2)) == "across" and machine.stages(range(4)) == machine.stages([3, 1, 2, 0])


def test_adapters_are_shared() -> None:
    node = Machine.load("dgx-h100")
    assert node.stages(range(16))[0].sharing == 1
    assert dataclasses.replace(node, rails=3).stages(range(16))[0].sharing == 3
    assert [s.sharing for s in Machine.load("lassen").stages(range(16))] == [4, 1]


def test_emulated() -> None:
    machine = small().emulated(2e-4, 1e-9)
    assert machine.links["device"] == small().links["device"]
    assert {machine.links[level] for level in LEVELS[1:]} == {Link(2e-4, 1e-9)}
    assert machine.name != "small" and "emulated" in machine.source
    assert Machine.parse(machine.to_toml()) == machine
    assert small().emulated(0, 0, name="ideal").name == "ideal"


def test_link() -> None:
    assert Link(1e-6, 2e-9).seconds(500) == pytest.approx(2e-6)
    assert Link(0, 0).bandwidth == float("inf")
    with pytest.raises(ValueError, match="alpha >= 0"):
        Link(-1, 0)
    with pytest.raises(ValueError, match="beta >= 0"):
        Link(0, float("nan"))


def test_roofline_by_hand() -> None:
    ideal = small()
    assert ideal.roofline(0, 0, "float32") == 1e-5  # the launch floor
    assert ideal.roofline(2e9, 1e6, "float32") == pytest.approx(1e-5 + 2.0)  # arithmetic
    assert ideal.roofline(2e6, 1e8, "float32") == pytest.approx(1e-5 + 1.0)  # memory
    real = small(efficiency=Efficiency(compute=0.5, half=1e6, exponent=1.0, least=0.1, memory=0.8))
    assert real.rate(1e6, "float32") == pytest.approx(0.25e9)
    assert real.rate(1.0, "float32") == pytest.approx(0.05e9)  # the floor of the curve
    assert real.roofline(3e6, 0, "float32") == pytest.approx(1e-5 + (3e6 + 1e6) / 0.5e9)  # a constant loss
    assert real.roofline(0, 8e7, "float32") == pytest.approx(1e-5 + 1.0)
    gentle = small(efficiency=Efficiency(half=1e6, exponent=0.5))
    assert gentle.rate(4e6, "float32") == pytest.approx(1e9 / 1.5)


@given(st.floats(0, 1e15), st.floats(0, 1e12), st.floats(1, 10), st.sampled_from(MACHINES))
def test_roofline_never_falls(flops: float, nbytes: float, factor: float, name: str) -> None:
    machine = Machine.load(name)
    seconds = machine.roofline(flops, nbytes, "float32")
    slack = 1 + 1e-12
    assert machine.launch <= seconds <= machine.roofline(flops * factor, nbytes, "float32") * slack
    assert seconds <= machine.roofline(flops, nbytes * factor, "float32") * slack


def test_large_convolutions_on_lassen() -> None:
    """On Lassen a large convolution of the 2K mesh model runs at 50-75 % of the peak, a deep one far below."""
    lassen = Machine.load("lassen")
    large, deep = 2 * 1024 * 1024 * 9 * 128 * 128, 2 * 16 * 16 * 9 * 128 * 128
    assert 0.5 < lassen.rate(large, "float32") / 15.7e12 < 0.75
    assert lassen.rate(deep, "float32") < 0.1 * 15.7e12


def test_unknown_data_type() -> None:
    with pytest.raises(UserError, match=r"machine small: expected .*\(float32\), got int8; add it"):
        small().roofline(1, 1, "int8")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"900 GB/s"', '"900 Gb/s"', "device.memory_bandwidth: expected a bandwidth with its unit"),
        ('"16 GiB"', '"16"', "device.memory: expected a size with its unit"),
        ('"16 GiB"', '"0 B"', "device.memory: expected a number >= 1, got 0"),
        ('alpha = "8 us"', "alpha = 8e-6", "links.node.alpha: expected a time with its unit"),
        ('float32 = "15.7 Tflop/s"', 'float32 = "15.7 TFLOPS"', "device.peak_flops.float32: expected a rate of"),
        (
            "[links.across]",
            "[links.acros]",
            "links.acros: unknown key; expected one of device, node, switch, across; did you",
        ),
        ("nodes_per_switch", "nodes_per_swich", "nodes_per_swich: unknown key"),
        ('alpha = "8 us"', 'latency = "8 us"', "links.node.latency: unknown key; expected one of alpha, beta,"),
        ("[device.efficiency]", "efficiency = 1\n[else]", "else: unknown key; expected one of name, source,"),
        ('memory = "16 GiB"', 'memroy = "16 GiB"', "device.memroy: unknown key; expected one of name, memory,"),
        ('alpha = "8 us"', "", "links.node.alpha: expected a value, got nothing; this key is required"),
        ('alpha = "8 us"', 'alpha = "8 us"\nbandwidth = "1 B/s"', "links.node: expected one of beta"),
        ('beta = "26.61 ps/B"', "", "links.node: expected one of beta"),
        ("devices_per_node = 4", "devices_per_node = 0", "devices_per_node: expected a whole number >= 1, got 0"),
        ("devices_per_node = 4", "devices_per_node = 4.5", "devices_per_node: expected a whole number, got 4.5"),
        ("compute = 0.75", "compute = 75", "device.efficiency.compute: expected a number <= 1, got 75"),
        ("compute = 0.75", 'compute = "75 %"', "device.efficiency.compute: expected a number, got '75 %'"),
        ('name = "lassen"', 'name = ""', "name: expected a text that is not empty"),
        ('name = "lassen"', "name = lassen", "expected valid TOML, got an error"),
    ],
)
def test_wrong_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in LASSEN
    path = tmp_path / "mine.toml"
    path.write_text(LASSEN.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        Machine.load(path)
    assert f"mine.toml: {message}" in str(caught.value) and "\n" not in str(caught.value)


def without(text: str, table: str) -> str:
    """Return the text of a file without one of its tables."""
    start = text.index(f"[{table}]")
    end = text.find("\n[", start)
    return text[:start] + (text[end + 1 :] if end > 0 else "")


@pytest.mark.parametrize("level", LEVELS)
def test_missing_level(level: str) -> None:
    text = without(LASSEN, f"links.{level}")
    with pytest.raises(UserError, match=rf"links\.{level}: expected a value, got nothing; this table is required"):
        Machine.parse(text)


def test_no_links_at_all() -> None:
    text = LASSEN[: LASSEN.index("[links.device]")]
    with pytest.raises(UserError, match="links: expected a value, got nothing; this table is required"):
        Machine.parse(text)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lasen", "did you mean lassen?"),
        ("h100", "did you mean dgx-h100?"),
        ("xyzzy", "write the path of your own machine file"),
    ],
)
def test_unknown_name(name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        Machine.load(name)
    assert f"got '{name}'; {hint}" in str(caught.value) and "cori-haswell" in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.toml: expected a TOML file to read, got an error \(No such file"):
        Machine.load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="got one that is not UTF-8 text"):
        Machine.load(tmp_path / "binary.toml")


def test_documented_file_and_table() -> None:
    """The example in docs/machines.md is a valid machine, and its table lists every shipped machine."""
    text = (FOLDER.resolve().parent.parent / "docs" / "machines.md").read_text(encoding="utf-8")
    machine = Machine.parse(text.split("```toml\n")[1].split("```")[0])
    assert machine.rails == 2 and machine.links["across"].alpha == 5e-6
    assert all(f"| `{name}` |" in text for name in MACHINES)


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1.2 us", "s", 1.2e-6),
        ("8 µs", "s", 8e-6),
        ("5ms", "s", 5e-3),
        ("0 s", "s", 0.0),
        ("38.93 ps/B", "s/B", 3.893e-11),
        ("1e-9 s/B", "s/B", 1e-9),
        ("16 GiB", "B", 16 * 2**30),
        ("16GB", "B", 16e9),
        (" 900 GB/s ", "B/s", 900e9),
        ("300 Mflop", "flop", 3e8),
        ("15.7 Tflop/s", "flop/s", 15.7e12),
        (".5 Pflop/s", "flop/s", 5e14),
    ],
)
def test_value(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "unit", "remedy"),
    [
        (5, "s", "write a number and a unit in quotes"),
        ("fast", "s", "write a number and a unit in quotes"),
        ("", "s", "write a number and a unit in quotes"),
        ("5", "s", "the unit must be one of ps, ns, us"),
        ("5 GB", "s", "the unit must be one of ps, ns, us"),
        ("100 Gb/s", "B/s", "the unit must be one of B/s, kB/s"),
        ("16 gib", "B", "GiB"),
        ("-1 us", "s", "it must be finite and not negative"),
        ("1e999 s", "s", "it must be finite and not negative"),
    ],
)
def test_refusal(text: object, unit: str, remedy: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_quantity(text, unit)
    message = str(caught.value)
    assert message.startswith(f"expected {UNITS[unit][0]} with its unit") and f"got {text!r}" in message
    assert remedy in message and "\n" not in message


@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False), st.sampled_from(sorted(UNITS)))
def test_quantities_are_read_back(value: float, unit: str) -> None:
    again = parse_quantity(format_quantity(value, unit), unit)
    assert again == value and math.copysign(1, again) > 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_is_shown_as_it_is(value: float) -> None:
    assert format_quantity(value, "s") == f"{value} s"
