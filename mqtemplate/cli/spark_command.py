"""The command ``spark``: what a Spark cluster needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from mqtemplate.cli.output import print_line

HELP = "write the package for Spark's executors"
DESCRIPTION = """\
Write the package for Spark's executors.

  python -m mqtemplate spark package mqtemplate-spark.zip
  spark-submit --py-files mqtemplate-spark.zip job.py

The executors need numpy and pyarrow, and the Python version of the driver. A session of mqtemplate.spark.session sends
the package by itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("action", choices=["package"], help="what to write")
    parser.add_argument("file", nargs="?", default="mqtemplate-spark.zip", help="the zip (default: %(default)s)")


def run(options: argparse.Namespace) -> None:
    """Write the package."""
    from mqtemplate.spark.package import write_package

    path = write_package(Path(options.file))
    print_line(f"{path}: {path.stat().st_size >> 10} KiB; give it to spark-submit as --py-files {path}")
