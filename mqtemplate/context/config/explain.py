"""pydantic's findings in our words: where it was written, which key, what is wrong, what may have been meant."""

from __future__ import annotations

import difflib

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mqtemplate.context.config.binding import Binding
from mqtemplate.context.config.environment import variable_name
from mqtemplate.context.config.relaxed_keys import shown
from mqtemplate.context.config.schema import Location, as_written, is_secret, known_paths
from mqtemplate.context.settings.properties import ContradictionError
from mqtemplate.errors import ConfigurationError


def explain(error: ValidationError, binding: Binding) -> ConfigurationError:
    """One error that lists all findings, a line each. Values of secrets are not in it."""
    problems = error.errors(include_url=False)
    lines = [f"configuration is not usable: {len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += (f"  {_line(problem, binding)}" for problem in problems)
    return ConfigurationError("\n".join(lines))


def _line(problem: ErrorDetails, binding: Binding) -> str:
    location = problem["loc"]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ContradictionError):
        place = (*location, *(cause.keys[0].split(".") if cause.keys else ()))
        return f"{binding.origin_of(place)}: {_key(binding, place)}: {cause}"
    where = f"{binding.origin_of(location)}: {_key(binding, location)}"
    if problem["type"] == "extra_forbidden":
        return f"{where}: no such key{_nearest(binding, location)}"
    if problem["type"] == "missing":
        in_list = any(isinstance(part, int) for part in location)  # which no variable can name
        variable = "" if in_list else f" or as {variable_name(tuple(map(str, (*binding.prefix, *location))))}"
        return f"{where}: required; set it in application.yml{variable}"
    text = f"{where}: {problem['msg'].removeprefix('Value error, ')}"
    if is_secret(binding.model, location):
        return f"{text} (its value is not shown)"
    if not isinstance(problem["input"], str | int | float):
        return text  # a whole section or list: there may be secrets in it
    return f"{text} (got {problem['input']!r})"


def _key(binding: Binding, location: Location) -> str:
    return shown((*binding.prefix, *as_written(binding.model, location)))


def _nearest(binding: Binding, location: Location) -> str:
    """What may have been meant: a neighbour first, then any key, else what there is at this place."""
    known = [as_written(binding.model, path) for path in known_paths(binding.model)]
    section = as_written(binding.model, location[:-1])
    siblings = {str(path[-1]): path for path in known if path[:-1] == section}
    if close := difflib.get_close_matches(str(location[-1]), siblings, 1):
        return f"; did you mean '{shown((*binding.prefix, *siblings[close[0]]))}'?"
    wanted = shown(as_written(binding.model, location))
    anywhere = {key: path for path in known if not wanted.startswith(key := shown(path))}
    if close := difflib.get_close_matches(wanted, anywhere, 1, cutoff=0.75):
        return f"; did you mean '{shown((*binding.prefix, *anywhere[close[0]]))}'?"
    return f"; here may stand: {', '.join(siblings)}" if siblings else ""
