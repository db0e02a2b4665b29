"""Tests of configurations: valid files, overrides, and every message."""

import pytest

from halograd.documents import parse_toml
from halograd.errors import UserError
from halograd.training.config import check_config, load_config, parse_config

TEXT = """
[model]
name = "mesh"
resolution = 64
[data]
path = "a.h5"
[optimizer]
kind = "sgd"
momentum = 0.9
[schedule]
learning_rate = 0.1
[training]
epochs = 2
batch = 4
[output]
directory = "runs/a"
"""


def test_values_and_defaults():
    config = parse_config(TEXT)
    assert config.model.name == "mesh" and config.model.options == {"resolution": 64}
    assert config.optimizer.momentum == 0.9 and config.optimizer.nesterov is False
    assert config.strategy.sample is None and config.strategy.height == 1
    assert config.training.dtype == "float32" and config.training.clip_norm is None


def test_overrides():
    overrides = ["training.epochs=7", "strategy.height=2", 'data.path="b c.h5"', "output.directory=runs/b"]
    config = parse_config(TEXT, [*overrides, "model.widths=[1, 2]", "schedule.learning_rate=1"])
    assert config.training.epochs == 7 and config.strategy.height == 2 and config.data.path == "b c.h5"
    assert config.output.directory == "runs/b" and config.model.options["widths"] == [1, 2]
    assert config.schedule.learning_rate == 1.0
    config = parse_config(TEXT, ["optimizer={kind = 'adam', beta1 = 0.5}", "optimizer.beta2=0.6"])
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.5, 0.6)


@pytest.mark.parametrize("shares", [[2, 1, 1], [1, 2], [3]])
def test_uneven_shares(shares):
    of_file = parse_config(TEXT.replace("[data]", f"[strategy]\nheight = {shares}\n[data]"))
    of_option = parse_config(TEXT, [f"strategy.height={shares}"])
    of_call = check_config({**parse_toml(TEXT, "a"), "strategy": {"height": shares}}, source="fit()")
    assert of_file.strategy.height == of_option.strategy.height == of_call.strategy.height == tuple(shares)


@pytest.mark.parametrize(
    ("value", "where"),
    [("[2, 0]", r"strategy.height\[1\]: expected a whole number >= 1, got 0"),
     ("[1.5, 1]", r"strategy.height\[0\]: expected a whole number, got 1.5"),
     ("true", "strategy.height: expected a whole number or a list, got true")],
)  # fmt: skip
def test_shares_that_are_none(value, where):
    with pytest.raises(UserError, match=where):
        parse_config(TEXT, [f"strategy.height={value}"])


def test_a_plan_in_place_of_the_table():
    assert parse_config('strategy = "auto"\n' + TEXT).strategy.auto
    assert parse_config(TEXT, ["strategy=auto"]).strategy.auto


def test_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    assert load_config(path, ["training.batch=8"]).training.batch == 8


WARMUP = "unknown key; expected one of kind, learning_rate, warmup_epochs, warmup_start, factors, milestones, "
WARMUP += "factor, final; did you mean warmup_epochs or warmup_start?"
ONE_OF_SGD = "kind, momentum, nesterov, weight_decay"

BAD = [
    ("training.epochs=many", "training.epochs: expected a whole number, got 'many'"),
    ("training.epochs=2.5", "training.epochs: expected a whole number, got 2.5"),
    ("training.epochs=true", "training.epochs: expected a whole number, got true"),
    ("training.epochs=0", "training.epochs: expected a whole number >= 1, got 0"),
    ("training.clip_norm=-1", "training.clip_norm: expected a number > 0, got -1"),
    ("data.validation=1", "data.validation: expected a number < 1 or a list, got 1"),
    ("schedule.learning_rate=fast", "schedule.learning_rate: expected a number, got 'fast'"),
    ("schedule.milestones=3", "schedule.milestones: expected a list, got 3"),
    ("schedule.milestones=[1, 'a']", "schedule.milestones[1]: expected a number, got 'a'"),
    ("schedule.milestones=[3, 1]", "schedule.milestones: expected rising epochs, got [3.0, 1.0]"),
    ("schedule.kind=step", "schedule.milestones: expected the epochs at which the rate drops, got none"),
    ("schedule={kind = 'step', learning_rate = 1e20, milestones = [1, 2], factor = 1e6}", "schedule.factor: "),
    ("schedule.warmup_epochs=1e308", "schedule.warmup_epochs: expected a number <= 1e+06, got 1e+308"),
    ("optimizer={kind = 'adam', epsilon = 1e308}", "optimizer.epsilon: expected a number <= 1, got 1e+308"),
    ("training.batch=2147483648", "training.batch: expected a whole number <= 2147483647, got 2147483648"),
    ("training.batch=1e5", "training.batch: expected a whole number, got 100000.0"),
    ("data.prefetch=100000000", "data.prefetch: expected a whole number <= 64, got 100000000"),
    ("data.prefetch=9223372036854775807", "data.prefetch: expected a whole number <= 64, got 9223372036854775807"),
    ("backend.threads=1000000", "backend.threads: expected a whole number <= 4096, got 1000000"),
    ('data.path="a\\u0000b"', "data.path: expected a path that is not empty and has no control characters, got 'a\\x"),
    ('output.directory=""', "output.directory: expected a path that is not empty and has no control characters, got"),
    ("backend.device=gpu", "backend.device: expected one of 'auto' or a whole number or a list, got 'gpu'"),
    ("backend.device=[]", "backend.device: expected one of 'auto' or a whole number or 1 or more entries, got []"),
    ("strategy={auto = true, memory = '16'}", "strategy.memory: expected a size with its unit, such as"),
    ("model.name=3", "model.name: expected a text in quotes, got 3"),
    ("output.checkpoint_minutes=soon", "output.checkpoint_minutes: expected a number, got 'soon'"),
    ("run.stall_minutes=-1", "run.stall_minutes: expected a number >= 0, got -1"),
    ("output.progress=1", "output.progress: expected true or false, got 1"),
    ("data.layout=HW", "data.layout: expected one of 'NHWC', 'NCHW' or 'NHW', got 'HW'"),
    ("data.transforms={Pressure = 3}", "data.transforms.Pressure: expected a text in quotes, got 3"),
    ("data.transforms=log", "data.transforms: expected a table, got 'log'"),
    (
        "optimizer.kind=rms",
        """optimizer.kind: expected sgd, adam, adamw, lion, lamb, lars, or "FILE.py:CLASS", got 'rms'""",
    ),
    ("optimizer.momentm=0.9", f"optimizer.momentm: unknown key; expected one of {ONE_OF_SGD}"),
    ("optimizer.beta1=0.9", f"optimizer.beta1: unknown key; expected one of {ONE_OF_SGD}"),
    ("schedule.warmup=1", f"schedule.warmup: {WARMUP}"),
    ("trainig.epochs=3", "trainig: unknown key; expected one of model, data, strategy, reduction, optimizer, "),
]


@pytest.mark.parametrize("override, message", BAD, ids=[b[0] for b in BAD])
def test_message(override, message):
    assert_refused(TEXT, [override], message)


def assert_refused(text, overrides, message):
    with pytest.raises(UserError) as caught:
        parse_config(text, overrides, "run.toml")
    told = str(caught.value)
    assert told.startswith(f"run.toml: {message}") and "\n" not in told


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("epochs = 2", "", "training.epochs: expected a value, got nothing; this key is required"),
        ('kind = "sgd"', "", "optimizer.kind: expected a value, got nothing; this key is required"),
        ("[schedule]\nlearning_rate = 0.1", "", "schedule: expected a value, got nothing; this table is required"),
        ('[model]\nname = "mesh"\nresolution = 64', "model = 3", "model: expected a table, got 3"),
        ("momentum = 0.9", "nesterov = true", "optimizer.nesterov: expected momentum > 0 with it, got 0"),
        ("[data]", "[strategy]\nfile = 'a'\nwidth = 2\n[data]", "strategy.file: expected no other key with it, got"),
        ("batch = 4", "batch = ", "expected valid TOML, got an error: Invalid value (at line "),
    ],
)
def test_message_of_text(old, new, message):
    assert_refused(TEXT.replace(old, new), [], message)


@pytest.mark.parametrize(
    "override, message",
    [
        ("training", "--set: expected section.key=value, got 'training'"),
        ("epochs=3", "--set: expected section.key=value, got 'epochs=3'"),
        ("training.=3", "--set: expected section.key=value, got 'training.=3'"),
        ("training.epochs.x=3", "--set training.epochs.x: expected a table at 'epochs', got 2"),
        ("training.batch=[1", "--set training.batch: expected a TOML value, got '[1'"),
        ("training.batch=", "--set training.batch: expected a TOML value, got ''"),
        ("schedule.learning_rate=inf", "--set schedule.learning_rate: expected a finite number, got inf"),
        ("training.batch=1\nx = 2", "--set training.batch: expected one TOML value, got '1\\nx = 2'"),
    ],
)
def test_message_of_override(override, message):
    with pytest.raises(UserError) as caught:
        parse_config(TEXT, [override])
    assert str(caught.value) == message


def test_no_file(tmp_path):
    with pytest.raises(UserError, match=r"none.toml: .*\(No such file"):
        load_config(tmp_path / "none.toml")


def test_binary_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"run.toml: .* not UTF-8"):
        load_config(path)
