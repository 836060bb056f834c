"""The documentation of the keys: ``docs/configuration.md`` and the sections contain the same."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from mqtemplate import EmbeddedSettings, RemoteSettings
from mqtemplate.context import AppSettings
from mqtemplate.context.config.schema import all_fields, fields_of
from mqtemplate.context.config.tree import kebab
from mqtemplate.context.settings.broker import BrokerSettings, ClusterSettings, ServerSettings
from mqtemplate.context.settings.properties import DeclaredIn
from mqtemplate.context.settings.rocketmq import ProducerSettings
from mqtemplate.server import BrokerServerSettings
from tests.context.settings.reference import PAGE, configuration_reference, field_documentation


def test_the_page_contains_the_current_reference() -> None:
    """To update the page, run ``python -m tests.context.settings.reference``."""
    assert configuration_reference() in PAGE.read_text("utf-8")


def test_every_key_has_a_row_with_a_sentence() -> None:
    reference = configuration_reference()

    for path, shape in all_fields(AppSettings):
        if shape.section is not None:
            continue
        section, name = ".".join(map(kebab, path[:-1])), kebab(path[-1])
        _, _, below = reference.partition(f"### `{section}`\n")
        row = next(
            line for line in below.split("\n###")[0].splitlines() if line.startswith((f"| `{name}`", f"| `{name}."))
        )
        assert len(row.split("|")[3].strip()) > 10


# --- one declaration of each setting --------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (BrokerSettings(), EmbeddedSettings()),
        (ServerSettings(), BrokerServerSettings()),
        (ClusterSettings(), RemoteSettings(name_servers=("127.0.0.1:9876",))),
    ],
    ids=["embedded broker", "server", "client of a cluster"],
)
def test_a_section_has_the_defaults_of_the_settings_that_it_extends(section: object, settings: object) -> None:
    """The section inherits the fields; none of them is declared twice."""
    [base] = [kind for kind in type(section).__mro__[1:] if kind in type(settings).__mro__][:1]
    inherited = [field.name for field in dataclasses.fields(base)]  # type: ignore[arg-type]

    assert inherited
    assert [getattr(section, name) for name in inherited] == [getattr(settings, name) for name in inherited]
    assert {*vars(type(section))["__annotations__"]}.isdisjoint(inherited)


def test_a_field_that_is_taken_from_other_settings_has_their_type_default_and_text() -> None:
    fields = fields_of(ProducerSettings)
    taken = {name: mark for name, field in fields.items() for mark in field.metadata if isinstance(mark, DeclaredIn)}

    assert set(taken) == {
        "compress_message_body_threshold",
        "retry_times_when_send_failed",
        "retry_times_when_send_async_failed",
        "retry_next_server",
    }
    for name, mark in taken.items():
        settings = RemoteSettings(name_servers=("127.0.0.1:9876",))
        assert fields[name].default == getattr(settings, mark.name)
        assert fields[name].annotation is get_type_hints(mark.settings)[mark.name]
    assert (
        field_documentation(ProducerSettings, "retry_times_when_send_async_failed")
        == "Retries of an asynchronous send."
    )
