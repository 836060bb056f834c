"""The reference has all public names, each under the path by which programs import it."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import Counter
from importlib.util import find_spec

import pytest

from mqtemplate import RocketMQTemplate
from mqtemplate.template.spring_names import SpringNames
from tests.docs.fences import DOCS

SHADOWED = {
    # a module of the same name stands in the package: the path has both
    "mqtemplate.template.transactions.transaction_listener": "mqtemplate.transaction_listener",
}
COMPLETE = (
    "mqtemplate",
    "mqtemplate.errors",
    "mqtemplate.testing",
    "mqtemplate.outbox",
    "mqtemplate.outbox.django",
    "mqtemplate.converters",
    "mqtemplate.server",
    "mqtemplate.operations",
    "mqtemplate_starter_fastapi",
    "mqtemplate_starter_flask",
    "mqtemplate_starter_django",
)
"""Packages all of whose exported names are public."""

TEMPLATE = "mqtemplate.RocketMQTemplate."


def names_on(page: str) -> list[str]:
    """Return the names on a page of the reference, in order."""
    text = (DOCS / "reference" / f"{page}.md").read_text("utf-8")
    return [SHADOWED.get(path, path) for path in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]


NAMES = [path for page in sorted((DOCS / "reference").glob("*.md")) for path in names_on(page.stem)]


def exported(package: str) -> set[str]:
    """Return the names of ``__all__`` with the package before them."""
    names: list[str] = importlib.import_module(package).__all__
    return {f"{package}.{name}" for name in names}


@pytest.mark.parametrize("package", COMPLETE)
def test_every_exported_name_is_in_the_reference(package: str) -> None:
    left_out = {
        "mqtemplate.errors",  # a module, with a page of its own
        "mqtemplate.errors.MQTemplateError",  # on its page, or as mqtemplate.MQTemplateError
        "mqtemplate.MQTemplateError",
        *(f"mqtemplate.errors.{name}" for name in ("Picklable", "escaped", "reworded")),  # of the library itself
        "mqtemplate_starter_django.DjangoAutoConfiguration",  # found by its entry point; no program imports it
    }

    assert exported(package) - set(NAMES) - left_out == set()


def test_a_name_stands_in_the_reference_once() -> None:
    assert [name for name, count in Counter(NAMES).items() if count > 1] == []


@pytest.mark.parametrize("path", NAMES)
def test_a_name_of_the_reference_is_exported_and_documented(path: str) -> None:
    if path.startswith(TEMPLATE):
        path, _, method = path.rpartition(".")
        assert (inspect.getdoc(inspect.getattr_static(RocketMQTemplate, method)) or "").strip()
    package, _, name = path.rpartition(".")
    if name == "MQTemplateBackend" and find_spec("django.tasks") is None:
        pytest.importorskip("django_tasks", reason="the backend needs tasks, and this Django is older than 6")

    assert name in importlib.import_module(package).__all__
    value = getattr(importlib.import_module(package), name)
    assert not (inspect.isclass(value) or inspect.isfunction(value)) or (value.__doc__ or "").strip()


def test_the_reference_of_the_template_begins_with_what_an_application_calls() -> None:
    """Each method has a place of its own. The class, with its constructor and Spring's names, is the last."""
    page = names_on("sending")
    methods = [path.removeprefix(TEMPLATE) for path in page if path.startswith(TEMPLATE)]

    assert methods[:4] == ["sync_send", "async_send", "send_one_way", "convert_and_send"]
    assert page[: len(methods)] == [TEMPLATE + name for name in methods]
    assert page[-1] == "mqtemplate.RocketMQTemplate"


def test_no_method_of_the_template_is_missing_in_the_reference() -> None:
    """Beside the awaitable forms, which its first lines name."""
    public = {name for name in dir(RocketMQTemplate) if not name.startswith("_")} - set(dir(SpringNames))

    left_out = {name for name in public if TEMPLATE + name not in names_on("sending")}

    assert {name for name in left_out if TEMPLATE + name.removeprefix("async_") not in names_on("sending")} == {
        "add_outbox"  # called by an outbox
    }
    page = (DOCS / "reference" / "sending.md").read_text("utf-8")
    assert [name for name in left_out if name.startswith("async_") and f"`{name}`" not in page] == []
