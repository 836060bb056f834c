"""Selectors: which messages of a topic a consumer group receives, by tags or by an SQL92 expression."""

from mqtemplate.selectors.tags import Selector, SelectorType, TagSelector, make_selector

__all__ = ["Selector", "SelectorType", "TagSelector", "make_selector"]
