"""Hypothesis strategies: commands, headers and bodies of every shape."""

from __future__ import annotations

import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from mqtemplate.message import MessageQueue
from mqtemplate.remoting.protocol import LanguageCode, RemotingCommand, SerializeType
from mqtemplate.remoting.protocol.headers.fields import BoundaryType, Long, declared_fields

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
int4 = st.integers(-(1 << 31), (1 << 31) - 1)
int8 = st.integers(-(1 << 63), (1 << 63) - 1)
_names = texts.filter(bool)


def commands() -> st.SearchStrategy[RemotingCommand]:
    """Return commands that both encodings can carry: the code is small and no text is empty."""
    return st.builds(
        RemotingCommand,
        code=st.integers(-32_768, 32_767),
        opaque=int4,
        flag=st.integers(0, 3),
        language=st.sampled_from(LanguageCode),
        version=st.integers(0, 32_767),
        remark=st.none() | _names,
        ext_fields=st.dictionaries(_names, _names, max_size=6),
        body=st.binary(max_size=200),
        serialize_type=st.sampled_from(SerializeType),
    )


_SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: texts,
    int: int4,
    Long: int8,
    bool: st.booleans(),
    BoundaryType: st.sampled_from(BoundaryType),
    float: st.floats(allow_nan=False, allow_infinity=False),
    MessageQueue: st.builds(MessageQueue, texts, texts, int4),
}


def instances(kind: Any) -> st.SearchStrategy[Any]:
    """Return instances of a header or body class."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: _values_of(hints[field.name]) for field, _, _ in declared_fields(kind)})


def json_values(max_leaves: int) -> st.SearchStrategy[Any]:
    """Return values of standard JSON, including numbers that are not finite."""
    return st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=max_leaves,
    )


def _values_of(hint: Any) -> st.SearchStrategy[Any]:
    if hint in _SCALARS:
        return _SCALARS[hint]
    parts = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return st.none() | _values_of(parts[0])
    if get_origin(hint) is list:
        return st.lists(_values_of(parts[0]), max_size=2)
    if get_origin(hint) is dict:
        return st.dictionaries(_values_of(parts[0]), _values_of(parts[1]), max_size=2)
    return instances(hint)
