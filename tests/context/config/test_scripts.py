"""Golden scripts of the configuration: files, variables and arguments, and the settings or the error that they give."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqtemplate.context import AppSettings, load_settings
from mqtemplate.context.settings.rocketmq import parse_name_server
from mqtemplate.context.settings.source import PROCESS, CommandLine
from mqtemplate.errors import ConfigurationError
from tests.golden import check_script, scripts_in

FEATURES = {"spellings": ("C7",)}


class ConfigScript:
    """The commands of a script. A source after ``load`` begins another configuration."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment: dict[str, str] = {}
        self._arguments: dict[str, object] = {}
        self._settings: AppSettings | None = None
        folder.mkdir()

    # --- sources -----------------------------------------------------------------------------------

    def file(self, name: str, text: str) -> None:
        self._begin()
        (self._folder / name).write_text(text, "utf-8")

    def yml(self, text: str) -> None:
        self.file("application.yml", text)

    def env(self, **variables: str) -> None:
        self._begin()
        self._environment |= variables

    def program(self, **keys: str) -> None:
        self._begin()
        self._arguments |= keys

    def command_line(self, profile: str = "", **keys: str) -> None:
        self._begin()
        PROCESS.given = CommandLine((profile,) if profile else (), keys)

    def _begin(self) -> None:
        if self._settings is not None:
            self._settings, self._environment, self._arguments = None, {}, {}
            PROCESS.given = CommandLine()
            shutil.rmtree(self._folder)
            self._folder.mkdir()

    # --- results -----------------------------------------------------------------------------------

    def load(self, *profiles: str) -> Iterator[str]:
        """Load the sources, again if another configuration follows, and print the error."""
        self._settings = AppSettings()  # a refused configuration has ended too
        environment = None if (self._folder / ".env").exists() else self._environment
        try:
            self._settings = load_settings(self._folder, profiles, environment, self._arguments)
        except ConfigurationError as refused:
            yield from self._lines(refused)

    def show(self, *keys: str) -> Iterator[str]:
        """Print the values of keys with their origins: those of the library typed, those of the application as read."""
        assert self._settings is not None
        for key in keys:
            value: Any = self._settings
            for part in key.split("."):
                value = getattr(value, part.replace("-", "_"), self)
            try:
                if value is self:
                    yield f"{key}: {self._settings.get(key)!r} ({self._settings.origin_of(key)})"
                else:
                    yield f"{key}: {value!r} ({self._settings.origins.of(key)})"
            except ConfigurationError as refused:
                yield from self._lines(refused)

    def profiles(self) -> Iterator[str]:
        assert self._settings is not None
        origins = self._settings.origins
        files = ", ".join(Path(file).name for file in origins.files)
        yield f"profiles {origins.profiles}, unmatched {origins.unmatched_profiles}, files {files}"

    def unused(self) -> Iterator[str]:
        assert self._settings is not None
        for variable, meant in self._settings.origins.unused_variables.items():
            yield f"{variable}: {meant}"

    def name_servers(self, text: str) -> Iterator[str]:
        """Print what each value of ``rocketmq.name-server`` chooses."""
        for line in text.splitlines():
            try:
                yield f"{line} -> {parse_name_server(line)}"
            except ValueError as refused:
                yield f"{line} -> {refused}"

    def _lines(self, refused: ConfigurationError) -> list[str]:
        assert "hunter2" not in str(refused), "an error shows a secret"
        return str(refused).replace(str(self._folder), "FOLDER").splitlines()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=[pytest.mark.feature(each) for each in FEATURES.get(path.stem, ())], id=path.stem)
        for path in scripts_in(Path(__file__).parent / "scripts")
    ],
)
def test_configurations_give_what_the_script_says(script: Path, tmp_path: Path) -> None:
    try:
        check_script(script, ConfigScript(tmp_path / "shop"))
    finally:
        PROCESS.given = CommandLine()
