"""The tables in docs/spring.md contain every public name of rocketmq-spring 2.3.5, and what they name here exists."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from functools import cache
from pathlib import Path
from shutil import which

import pytest

from mqtemplate import RocketMQTemplate
from mqtemplate.context.templates import ExtConsumerAttributes, ExtTemplateAttributes
from mqtemplate.listener import ListenerAttributes
from mqtemplate.listener.declaration.settings import ListenerSettings
from mqtemplate.template.transactions import TransactionListenerSpec

pytestmark = pytest.mark.feature("spring-names")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "spring.md"
LIST = Path(__file__).with_name("rocketmq_spring_2_3_5.txt")
JARS = ROOT / ".rocketmq" / "spring"
HEADING = "## Every name of rocketmq-spring 2.3.5"
INHERITED = {"send", "convertAndSend", "getDefaultDestination", "setDefaultDestination"} | {
    "getMessageConverter",
    "setMessageConverter",
}
"""Names that the template inherits from Spring's own base classes."""

OF_EVERY_ENUM = {"values", "valueOf"}
ATTRIBUTES = {
    "RocketMQMessageListener": {"topic", "consumer_group", *ListenerAttributes.__annotations__},
    "RocketMQTransactionListener": {field.name for field in fields(TransactionListenerSpec)},
    "ExtRocketMQTemplateConfiguration": {*ExtTemplateAttributes.__annotations__},
    "ExtRocketMQConsumerConfiguration": {*ExtConsumerAttributes.__annotations__},
}


@cache
def names() -> dict[str, set[str]]:
    """Return the public names by class."""
    lines = LIST.read_text("utf-8").splitlines()
    return {kind: set(rest.split()) for kind, _, rest in (line.partition(":") for line in lines)}


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return the tables of the page: class -> name -> text."""
    _, _, text = PAGE.read_text("utf-8").partition(HEADING)
    found: dict[str, dict[str, str]] = {}
    for section in text.split("\n### ")[1:]:
        title = re.match(r"`([\w.]+)`", section)
        assert title is not None, section[:80]
        rows = re.findall(r"^\| (`.*?) \| (.+) \|$", section, re.MULTILINE)
        found[title[1]] = {name: here for cell, here in rows for name in re.findall(r"`([\w]+)`", cell)}
    return found


@pytest.mark.parametrize("kind", sorted(names()))
def test_each_class_has_a_section_with_all_its_names(kind: str) -> None:
    assert set(tables()[kind]) == names()[kind]


def test_the_page_has_no_other_classes() -> None:
    assert set(tables()) == set(names())


def test_a_method_that_is_the_same_here_exists() -> None:
    same = [name for name, here in tables()["RocketMQTemplate"].items() if here.startswith("the same")]

    assert len(same) > 15
    assert [name for name in same if not hasattr(RocketMQTemplate, name)] == []


@pytest.mark.parametrize("kind", sorted(ATTRIBUTES))
def test_an_attribute_that_the_page_names_exists(kind: str) -> None:
    named = {
        attribute[1]
        for name, here in tables()[kind].items()
        if not name.endswith("_PLACEHOLDER") and (attribute := re.match(r"`(\w+)`", here)) is not None
    }

    assert named - ATTRIBUTES[kind] == set()
    assert len(named) >= len(names()[kind]) - 9, "all but placeholders, and names that are not attributes here"


def test_a_setting_of_a_container_that_the_page_names_exists() -> None:
    text = " ".join(tables()["DefaultRocketMQListenerContainer"].values())
    settings = set(re.findall(r"container\.endpoint\.settings\.(\w+)", text))
    attributes = set(re.findall(r"`(\w+)=` of `@message_listener`", text))

    assert settings - {field.name for field in fields(ListenerSettings)} == set()
    assert attributes - {"topic", "consumer_group", *ListenerAttributes.__annotations__} == set()


def test_a_key_that_the_page_names_exists() -> None:
    keys = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    texts = [here for table in tables().values() for here in table.values()]
    named = {found for text in texts for found in re.findall(r"`(rocketmq\.[a-z-]+\.[a-z0-9-]+)`", text)}

    assert len(named) > 20
    missing = []
    for key in sorted(named):
        section, _, name = key.rpartition(".")
        _, _, table = keys.partition(f"### `{section}`")
        if f"| `{name}` |" not in table.partition("###")[0]:
            missing.append(key)
    assert missing == []


@pytest.mark.conformance
def test_the_list_is_that_of_the_jar() -> None:
    """The list has the names of the classes in the jar of rocketmq-spring 2.3.5, as ``javap`` prints them."""
    jars = sorted(JARS.glob("rocketmq-spring-boot-2.3.5.jar"))
    if not jars or which("javap") is None:
        pytest.skip("rocketmq-spring 2.3.5 or javap is not here; 'make rocketmq' gets the jar")

    assert names_in(jars[0]) == {
        kind: members - (INHERITED if kind == "RocketMQTemplate" else set()) for kind, members in names().items()
    }


def names_in(jar: Path) -> dict[str, set[str]]:
    """Return the public names of the public classes of a jar."""
    listed = subprocess.run(["unzip", "-Z1", str(jar)], capture_output=True, text=True, check=True).stdout.split()
    classes = [entry.removesuffix(".class").replace("/", ".") for entry in listed if entry.endswith(".class")]
    path = ":".join(map(str, sorted(JARS.glob("*.jar"))))
    printed = subprocess.run(
        ["javap", "-cp", path, "-public", *classes], capture_output=True, text=True, check=True
    ).stdout
    found: dict[str, set[str]] = {}
    members: set[str] | None = None
    for line in printed.splitlines():
        if (
            declared := re.search(r"(?:class|interface) org\.apache\.rocketmq\.spring\.\w+\.([\w$]+)", line)
        ) is not None:
            if line.startswith(("public", "final public", "abstract")) and not re.search(r"\$\d", declared[1]):
                members = found.setdefault(declared[1].replace("$", "."), set())
            elif not line.startswith("  "):
                members = None
        if line.startswith("  public") and members is not None:
            name = re.search(r" (\w+)(?:\(.*)?(?: throws .*)?;$", line)
            is_constructor = re.match(r"  public [\w.$]+\(", line) is not None
            if name is not None and not is_constructor and name[1] not in {*OF_EVERY_ENUM, "toString"}:
                members.add(name[1])
    return found
