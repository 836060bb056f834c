"""Software bill of materials of an environment, as CycloneDX: ``python -m tests.release.sbom FILE``.

It runs by the Python of the environment and only uses the standard library.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Any

ROOT_NAME = "mqtemplate"


def bill_of_materials(root: str = ROOT_NAME) -> dict[str, Any]:
    """Return the bill of a distribution and of all that it needs here, in versions as installed. No extras count."""
    needed: dict[str, Distribution] = {}
    edges: dict[str, list[str]] = {}
    queue = [root]
    while queue:
        name = queue.pop()
        if name in needed:
            continue
        needed[name] = distribution(name)
        edges[name] = sorted(_requirements(needed[name]))
        queue += edges[name]
    components = {name: _component(name, found) for name, found in sorted(needed.items())}
    described = components.pop(root)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": described | {"type": "application"}},
        "components": list(components.values()),
        "dependencies": [
            {"ref": _ref(name, needed), "dependsOn": [_ref(each, needed) for each in edges[name]]}
            for name in sorted(needed)
        ],
    }


def _requirements(found: Distribution) -> set[str]:
    """Return the names that a distribution requires and that are installed; a marker may exclude one here."""
    names = set()
    for requirement in found.requires or []:
        text, _, marker = requirement.partition(";")
        match = re.match(r"[A-Za-z0-9._-]+", text)
        if match is None or "extra ==" in marker:
            continue
        name = _normalized(match[0])
        try:
            distribution(name)
        except ModuleNotFoundError:  # for another system or Python
            continue
        names.add(name)
    return names


def _component(name: str, found: Distribution) -> dict[str, Any]:
    metadata = found.metadata
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{found.version}",
        "name": name,
        "version": found.version,
        "purl": f"pkg:pypi/{name}@{found.version}",
    }
    expression, licence = metadata.get("License-Expression"), metadata.get("License")
    if expression:
        component["licenses"] = [{"expression": expression}]
    elif licence and "\n" not in licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def _ref(name: str, needed: dict[str, Distribution]) -> str:
    return f"pkg:pypi/{name}@{needed[name].version}"


def _normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(bill_of_materials(), indent=2) + "\n", encoding="utf-8")
