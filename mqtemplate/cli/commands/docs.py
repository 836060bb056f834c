"""``docs``: documents about an application."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mqtemplate.cli.invocation import Invocation, command, refuse_dangling_link
from mqtemplate.cli.output import print_line
from mqtemplate.errors import ConfigurationError


class Format(StrEnum):
    """Format of a document."""

    YAML = "yaml"
    JSON = "json"
    MARKDOWN = "markdown"


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    group = typer.Typer(help="Write documents about an application.", no_args_is_help=True)
    examples = (
        "docs asyncapi shop.main:app",
        "docs asyncapi shop.main:app --format json --output asyncapi.json",
        "docs asyncapi shop.main:app --title shop --app-version 1.2.0",
    )
    command(group, "asyncapi", *examples, without=("config", "as_json", "name_server"))(asyncapi)
    app.add_typer(group, name="docs")


def asyncapi(
    call: Invocation,
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
