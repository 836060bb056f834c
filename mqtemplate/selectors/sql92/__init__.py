"""SQL92 selectors: which messages of a topic a group matches, told by their properties."""

from mqtemplate.selectors.sql92.selector import Sql92Selector

__all__ = ["Sql92Selector"]
