"""Check of the extra ``dashboard``. This module needs nothing of it."""

from __future__ import annotations

from importlib.util import find_spec

from mqtemplate.errors import ConfigurationError

MOUNT = "/dashboard"
"""Path of the dashboard on the management port."""


def check_installed() -> None:
    """Check that the template library is installed.

    Raises:
        ConfigurationError: It is missing.
    """
    if find_spec("jinja2") is None:
        raise ConfigurationError("the dashboard needs jinja2: pip install 'mqtemplate[dashboard]'")
