"""Command that writes a new project: ``mqtemplate init``."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from mqtemplate.cli.invocation import Invocation, command
from mqtemplate.cli.output import print_line
from mqtemplate.errors import ConfigurationError

_FILES = {
    # file of the project -> its template beside this package
    "app.py": "app.py.txt",
    "listeners.py": "listeners.py.txt",
    "test_listeners.py": "test_listeners.py.txt",
    "application.yml": "application.yml.txt",
    "README.md": "README.md.txt",
    ".gitignore": "gitignore.txt",
}
_NAME = re.compile(r"[A-Za-z][\w-]{0,62}")


def add_commands(app: typer.Typer) -> None:
    """Add the command to the program."""
    examples = ("init shop", "init shop --directory ./services/shop")
    command(app, "init", *examples, without=("name_server", "config", "profile", "as_json"))(init)


def init(
    _call: Invocation,
    name: Annotated[str, typer.Argument(metavar="NAME", help="name of the project and of its consumer group")],
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="directory to write to (default: NAME in the current one)")
    ] = None,
) -> None:
    """Write a small project: an application, a listener, a test, and a configuration.

    It runs and passes its test at once. Existing files are never changed.
    """
    if _NAME.fullmatch(name) is None:
        raise typer.BadParameter(
            f"must begin with a letter and have only letters, digits, '-' and '_', 63 at most, got {name!r}",
            param_hint="NAME",
        )
    folder = Path(name) if directory is None else directory
    # Links count as existing: what is written stays in the folder, even if another user prepared it.
    existing = [file for file in _FILES if os.path.lexists(folder / file)]
    if existing:
        raise _refused(f"{folder} has {', '.join(existing)} already")
    if folder.is_symlink():
        raise _refused(f"{folder} is a symbolic link")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _refused(f"the folder {folder} cannot be created: {exc.strerror}") from exc
    templates = files("mqtemplate.cli") / "new_project"
    for file, template in _FILES.items():
        text = (templates / template).read_text(encoding="utf-8")
        try:
            with (folder / file).open("x", encoding="utf-8") as new:  # it follows no link, and replaces no file
                new.write(Template(text).substitute(name=name))
        except OSError as exc:
            raise ConfigurationError(
                f"{folder / file} cannot be written: {exc.strerror}; make that possible, or give another --directory"
            ) from exc
    print_line(f"{folder}: wrote {', '.join(_FILES)}")
    print_line(f"next: cd {folder}; mqtemplate run app; in another terminal, or after Ctrl-C: pytest")


def _refused(reason: str) -> typer.BadParameter:
    return typer.BadParameter(f"{reason}; nothing was written. Give another name, or --directory", param_hint="NAME")
