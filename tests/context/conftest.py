"""Fixtures that write ``application.yml`` and read it without the machine's own environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from mqtemplate.context import AppSettings, MQApplication, load_settings
from mqtemplate.errors import ConfigurationError
from tests.context.loading import AppOf, Load, Refusal, app_with


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Function ``load("yaml", dev="yaml of application-dev.yml", profiles=[…], environment={…}, arguments={…})``."""

    def write_and_load(
        base: str = "",
        *,
        profiles: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        arguments: Mapping[str, object] | None = None,
        **by_profile: str,
    ) -> AppSettings:
        (tmp_path / "application.yml").write_text(dedent(base).lstrip(), "utf-8")
        for profile, text in by_profile.items():
            (tmp_path / f"application-{profile}.yml").write_text(dedent(text).lstrip(), "utf-8")
        return load_settings(tmp_path, profiles, environment or {}, arguments)

    return write_and_load


@pytest.fixture
def refusal(load: Load) -> Refusal:
    """Function with the arguments of ``load`` that returns the text of the error."""

    def text_of(*args: object, **kwargs: object) -> str:
        with pytest.raises(ConfigurationError) as refused:
            load(*args, **kwargs)
        return str(refused.value)

    return text_of


@pytest.fixture
def app_of() -> Iterator[AppOf]:
    """Function `app_with`, whose applications are stopped at the end."""
    applications: list[MQApplication] = []

    def create(*components: object, **options: object) -> MQApplication:
        applications.append(app_with(*components, **options))
        return applications[-1]

    yield create
    for app in applications:
        app.stop()
