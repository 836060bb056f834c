"""Commands that install what an extra of this distribution needs."""

from __future__ import annotations

import re

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """Return the ``pip install`` of the packages of an extra, for the text of an error.

    It names the packages, not ``mqtemplate[extra]``: that would need an index that has mqtemplate, and this works
    from a clone and from a wheel too. Double quotes are understood by every shell, of Windows too.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        declared = requires("mqtemplate") or []
    except PackageNotFoundError:  # the folder of the sources is on the path, and nothing is installed
        declared = []
    found = [packages for each in declared if (packages := _of_extra(each, extra))]
    if not found:
        return f'pip install ".[{extra}]" in a clone of mqtemplate'
    return "pip install " + " ".join(f'"{each}"' for each in found)


def _of_extra(requirement: str, extra: str) -> str | None:
    """Return a requirement without its extra; None if it is of another one."""
    packages, _, marker = requirement.partition(";")
    rest, count = re.subn(rf"""(?:\s+and\s+)?\bextra == ['"]{re.escape(extra)}['"]""", "", marker)
    if not count:
        return None
    return f"{packages.strip()}; {rest.strip()}".replace('"', "'") if rest.strip() else packages.strip()
