"""Reference of the command line, generated from the commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from halograd.cli.commands import app

from .docstrings import row

__all__ = ["all_commands", "reference"]


def reference() -> str:
    """Return a section per command: description, arguments and options, examples."""
    lines: list[str] = []
    for name, command in all_commands():
        about, _, examples = (command.help or "").partition("\b")
        lines += [f"## `{name}` {{#{name.replace(' ', '-')}}}", ""]
        lines += ["```text", _usage(name, command), "```", "", about.strip(), ""]
        lines += _parameters(command)
        called = [line.strip() for line in examples.splitlines() if "halograd" in line]
        lines += ["", "```sh", *called, "```", ""] if called else [""]
    return "\n".join(lines)


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield names and commands, including ``halograd generate mesh-tangling``, without internal commands."""
    waiting = [("halograd", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        below = getattr(command, "commands", None)
        if below is None:
            yield name, command
        else:
            waiting += [(f"{name} {step}", inner) for step, inner in below.items() if not inner.hidden]


def _usage(name: str, command: Any) -> str:
    arguments = [_metavar(p) for p in command.params if p.param_type_name == "argument"]
    return " ".join((name, *arguments, "[OPTIONS]"))


def _parameters(command: Any) -> list[str]:
    lines = ["| | default | |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            shown = f"`{_metavar(parameter)}`"
        else:
            words = ", ".join(f"`{word}`" for word in (*parameter.opts, *parameter.secondary_opts))
            flag = getattr(parameter, "is_flag", False)
            shown = words if flag else f"{words} `{_metavar(parameter)}`"
        default = parameter.default
        plain = default in (None, False, "") or callable(default) or parameter.required
        help_text = getattr(parameter, "help", None) or ""
        lines.append(row(shown, "" if plain else f"`{default}`", help_text))
    return lines if len(lines) > 2 else []


def _metavar(parameter: Any) -> str:
    """Return the placeholder of a value: ``KEY=VALUE``, or the name of the parameter."""
    return parameter.metavar or parameter.name.upper()
