"""The command line: ``python -m mqtemplate``."""

from mqtemplate.cli.main import main

__all__ = ["main"]
