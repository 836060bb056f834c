"""``spark``: what a Spark cluster needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqtemplate.cli.formats import size_text
from mqtemplate.cli.invocation import Invocation, command, refuse_dangling_link


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the program."""
    spark = typer.Typer(help="Prepare a Spark cluster.", no_args_is_help=True)
    command(
        spark,
        "package",
        "spark package",
        "spark package job.zip && spark-submit --py-files job.zip job.py",
        without=("name_server", "config", "profile"),
    )(package)
    app.add_typer(spark, name="spark")


def package(
    call: Invocation,
    file: Annotated[Path, typer.Argument(help="the zip to write")] = Path("mqtemplate-spark.zip"),
) -> None:
    """Write the package for Spark's executors, for the option --py-files of spark-submit.

    The executors need numpy and pyarrow, and the Python version of the driver. A session of mqtemplate.spark.session
    sends the package by itself.
    """
    from mqtemplate.spark.driver.package import write_package

    refuse_dangling_link(file, "FILE")
    try:
        path = write_package(file)
    except OSError as exc:
        raise typer.BadParameter(f"{file} cannot be written: {exc.strerror}", param_hint="FILE") from exc
    record = {"file": str(path), "bytes": path.stat().st_size}
    call.output.document(record)
    call.output.line(f"{path}: {size_text(path.stat().st_size)}; give it to spark-submit as --py-files {path}")
