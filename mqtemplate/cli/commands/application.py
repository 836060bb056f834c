"""``config``, ``beans``, ``conditions`` and ``docs``: configuration, objects and documents of an application."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqtemplate.cli.invocation import TOP, CommandCall, command, command_group, refuse_dangling_link
from mqtemplate.cli.output import print_line
from mqtemplate.errors import ConfigurationError, DependencyError

if TYPE_CHECKING:
    from mqtemplate.context.injection.application_context import ApplicationContext


Components = Annotated[
    list[str] | None,
    typer.Argument(metavar="[MODULE[:NAME]]...", help="modules with components, or components; an MQApplication too"),
]


_CONFIG = command_group("config", "Show the configuration.")


# --- config -------------------------------------------------------------------------------------


@command(
    _CONFIG,
    "show",
    "config show --origins",
    "config show mqtemplate.broker --all --origins",
    "config show --profile prod --json",
)
def show_config(
    call: CommandCall,
    prefix: Annotated[str, typer.Argument(metavar="[KEY]", help="only this key, and the keys below it")] = "",
    origins: Annotated[bool, typer.Option("--origins", help="show where each value comes from")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="show defaults too")] = False,
) -> None:
    """Show the settings that files, profiles, the environment and options set. Secrets are hidden."""
    from mqtemplate.context.settings.source import explain_settings

    settings = call.settings()
    found = [
        each
        for each in explain_settings(settings)
        if (show_all or not each.is_default) and (each.key == prefix or each.key.startswith(_section(prefix)))
    ]
    records = [{"key": each.key, "value": each.value, "origin": each.origin} for each in found]
    columns: dict[str, Any] = {"KEY": "key", "VALUE": lambda record: _value_text(record["value"])}
    call.output.table(
        records, columns | ({"ORIGIN": "origin"} if origins else {}), "no key is set; see defaults: --all"
    )
    for variable, meant in settings.origins.unused_variables.items():
        call.output.note(f"warning: {variable} sets no key{f'; did you mean {meant}?' if meant else ''}")
    for profile in settings.origins.unmatched_profiles:
        call.output.note(f"warning: no file and no document is for the profile {profile!r}")


def _section(prefix: str) -> str:
    return f"{prefix.rstrip('.')}." if prefix else ""


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- beans and conditions -----------------------------------------------------------------------


@command(TOP, "beans", "beans shop.app", "beans shop.app:application --json")
def beans(call: CommandCall, components: Components = None) -> None:
    """Show the objects of an application with their origins, each after those that it uses. Nothing is started."""
    from mqtemplate.context.components import is_listener
    from mqtemplate.context.injection.marks import name_of

    context = _linked(call, components)
    records = [
        {
            "name": definition.name,
            "type": name_of(definition.kind),
            "module": definition.kind.__module__,
            "built_by": definition.title,
            "origin": definition.origin,
            "is_listener": definition.target is not None and is_listener(definition.target),
        }
        for definition in context.in_order()
    ]
    records += [
        {
            "name": getattr(component, "__name__", name_of(component)),
            "type": "listener function",
            "module": getattr(component, "__module__", ""),
            "built_by": name_of(component),
            "origin": "application",
            "is_listener": True,
        }
        for component in context.components
        if context.definition_of(component) is None and is_listener(component)
    ]
    columns: dict[str, Any] = {
        "NAME": "name",
        "TYPE": "type",
        "ORIGIN": "origin",
        "LISTENER": lambda record: "yes" if record["is_listener"] else "",
        "MODULE": "module",
    }
    call.output.table(records, columns, "no objects")


@command(TOP, "conditions", "conditions", "conditions shop.app --profile prod")
def conditions(call: CommandCall, components: Components = None) -> None:
    """Show which starters act in an application, and why the others do not. Nothing is started."""
    context = _linked(call, components)
    records = [{"starter": each.starter, "applied": each.applied, "reason": each.reason} for each in context.conditions]
    columns: dict[str, Any] = {
        "STARTER": "starter",
        "APPLIED": lambda record: "yes" if record["applied"] else "no",
        "REASON": "reason",
    }
    call.output.table(records, columns, "no starters are installed")


def _linked(call: CommandCall, names: list[str] | None) -> ApplicationContext:
    """Return the context of an application, with resolved dependencies. No object is opened.

    Raises:
        DependencyError: A component cannot be imported, or a dependency is missing.
    """
    from mqtemplate.context.components import collect_components
    from mqtemplate.context.injection.application_context import ApplicationContext
    from mqtemplate.context.phases import configure_and_link

    settings = call.settings()
    components = collect_components(part for name in names or [] for part in _imported(name))
    context = ApplicationContext(settings, None, components)
    configure_and_link(context)
    return context


def _imported(name: str) -> tuple[object, ...]:
    """Return the components that ``module`` or ``module:name`` names.

    Raises:
        DependencyError: It cannot be imported.
    """
    from mqtemplate.context.application import MQApplication

    module_name, _, attribute = name.partition(":")
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does
    try:
        found: Any = import_module(module_name)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
    except (ImportError, AttributeError) as exc:
        raise DependencyError(
            f"{name!r} cannot be imported: {exc}; give a module, or module:name, from the folder {folder}"
        ) from exc
    return found.context.components if isinstance(found, MQApplication) else (found,)


class Format(StrEnum):
    """Format of a document."""

    YAML = "yaml"
    JSON = "json"
    MARKDOWN = "markdown"


_DOCS = command_group("docs", "Write documents about an application.")


@command(
    _DOCS,
    "asyncapi",
    "docs asyncapi shop.main:app",
    "docs asyncapi shop.main:app --format json --output asyncapi.json",
    "docs asyncapi shop.main:app --title shop --app-version 1.2.0",
    without=("config", "as_json", "name_server"),
)
def asyncapi(
    call: CommandCall,
    target: Annotated[
        str, typer.Argument(metavar="MODULE[:NAME]", help="an MQApplication, a web application with one, or a module")
    ],
    form: Annotated[
        Format, typer.Option("--format", "-f", help="yaml, json, or markdown: tables for readers")
    ] = Format.YAML,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="write this file (default: the terminal)")
    ] = None,
    title: Annotated[
        str | None, typer.Option(metavar="TEXT", help="title of the application (default: the first part of MODULE)")
    ] = None,
    app_version: Annotated[str, typer.Option(metavar="VERSION", help="version of the application")] = "0.0.0",
) -> None:
    """Write the AsyncAPI 3 document of an application: its topics, messages and listeners.

    All objects are built, and nothing is started. What handlers return with @publishes is in the document; other sends
    are declared by @documents_send.
    """
    from mqtemplate.asyncapi import asyncapi_document
    from mqtemplate.running.target import RunOptions, load_application

    app = load_application(RunOptions(target=target, profiles=tuple(call.profile)))
    app.check()
    name = title or target.partition(":")[0].partition(".")[0]
    text = _text(asyncapi_document(app, title=name, version=app_version), form)
    if output is None:
        print_line(text)
        return
    refuse_dangling_link(output, "--output")
    try:
        output.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"--output {output}: {error.strerror}; name a file in a folder that exists") from error
    print_line(f"{output} written", sys.stderr)


def _text(document: dict[str, object], form: Format) -> str:
    """Return a document in a format."""
    if form is Format.JSON:
        import json

        return json.dumps(document, indent=2, ensure_ascii=False)
    if form is Format.MARKDOWN:
        from mqtemplate.asyncapi import markdown_of

        return markdown_of(document)
    return _yaml(document)


def _yaml(document: dict[str, object]) -> str:
    """Return a document as YAML without anchors: what stands in two places is written twice."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper without anchors."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    text: str = yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text.rstrip()
