"""The documentation of the keys is that of the models."""

from __future__ import annotations

from pathlib import Path

from mqtemplate.context import AppSettings
from mqtemplate.context.config.reference import configuration_reference
from mqtemplate.context.config.relaxed_keys import kebab
from mqtemplate.context.config.schema import field_shapes

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_holds_the_reference_as_it_is_now() -> None:
    """To bring it up to date, replace what stands below "All keys" by what ``configuration_reference()`` returns."""
    assert configuration_reference() in PAGE.read_text("utf-8")


def test_every_key_is_in_the_reference_with_a_sentence() -> None:
    reference = configuration_reference()

    for path, _ in field_shapes(AppSettings):
        section, name = ".".join(map(kebab, path[:-1])), kebab(path[-1])
        _, _, below = reference.partition(f"### `{section}`\n")
        row = next(
            line for line in below.split("\n###")[0].splitlines() if line.startswith((f"| `{name}`", f"| `{name}."))
        )
        assert len(row.split("|")[3].strip()) > 10
