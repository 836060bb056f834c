"""Generator of the reference of all keys in Markdown, which ``docs/configuration.md`` contains.

``python -m tests.context.settings.reference`` writes it into the page.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from mqtemplate.context.config.schema import FieldShape, fields_of, shape_of
from mqtemplate.context.config.tree import kebab
from mqtemplate.context.settings.app import AppSettings
from mqtemplate.context.settings.clients import REFUSED_BY_EMBEDDED, UNNEEDED_BY_EMBEDDED
from mqtemplate.context.settings.properties import DeclaredIn

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def configuration_reference() -> str:
    """Return a Markdown table for each section."""
    return "\n".join(_section(AppSettings, ""))


def field_documentation(section: type, name: str) -> str:
    """Return the text under a field: in the class, in a base class, or in the settings that `DeclaredIn` names."""
    field = fields_of(section).get(name)
    declared = next((mark for mark in field.metadata if isinstance(mark, DeclaredIn)), None) if field else None
    owner, name = (section, name) if declared is None else (declared.settings, declared.name)
    return next((texts[name] for base in inspect.getmro(owner) if name in (texts := _texts_under_fields(base))), "")


@cache
def _texts_under_fields(kind: type) -> dict[str, str]:
    """Return the string literals after the annotated names in the source of a class."""
    definition = _definition(kind)
    if definition is None:
        return {}
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(found))):
                texts[name] = " ".join(found.split())
    return texts


def _definition(kind: type) -> ast.ClassDef | None:
    """Return the definition of a class of the library. ``__module__`` of a public class is its public path."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("mqtemplate.") and vars(module).get(kind.__name__) is kind:
            for node in ast.parse(inspect.getsource(module)).body:
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    return node
    return None


def _section(section: type, prefix: str) -> Iterator[str]:
    rows = []
    below: list[tuple[str, type]] = []
    for name, field in fields_of(section).items():
        key = f"{prefix}{kebab(name)}"
        shape = shape_of(field.annotation)
        if shape.section is not None:
            below.append((key, shape.section))
            continue
        if shape.map_depth == 1 and shape.item_section is not None:
            below.append((f"{key}.<name>", shape.item_section))
        rows.append(_row(key, field, shape, field_documentation(section, name)))
    if rows:
        summary = " ".join((section.__doc__ or "").strip().split("\n\n")[0].split())
        yield from (f"### `{prefix.rstrip('.')}`", "", _for_a_cell(summary), "")
        yield from ("| Key | Default | What it does |", "| --- | --- | --- |", *rows, "")
    for key, inner in below:
        yield from _section(inner, f"{key}.")


def embedded_note(key: str) -> str:
    """Return the note on a key: refused or not needed by the embedded broker; empty if the broker uses it."""
    if key == "rocketmq.access-channel":
        return "refused, unless LOCAL"
    root, section, field = [*key.replace("-", "_").split("."), "", ""][:3]
    if root != "rocketmq":
        return ""
    if (reason := UNNEEDED_BY_EMBEDDED.get(section, {}).get(field)) is not None:
        return f"not needed: {reason.format(key=key)}"
    refusal = REFUSED_BY_EMBEDDED.get(section, {}).get(field)
    return "" if refusal is None else f"refused: {refusal}"


def _row(key: str, field: FieldInfo, shape: FieldShape, text: str) -> str:
    name = key.rpartition(".")[2] + (".<group>.<topic>" if shape.map_depth == 2 else "")
    name += ".<name>" if shape.map_depth == 1 and shape.item_section is not None else ""
    if note := embedded_note(key):
        text += f" *Embedded broker: {note}.*"
    default = "`true`" if shape.map_depth == 2 else _default(field)
    return f"| `{name}` | {default} | {_for_a_cell(text)} |"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value in (None, PydanticUndefined, (), {}):
        return "none"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _for_a_cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(text[: text.index("### `rocketmq`\n")] + configuration_reference(), "utf-8")
