"""SQL92 selectors: conditions over the properties of a message."""

from mqtemplate.selectors.sql92.selector import Sql92Selector

__all__ = ["Sql92Selector"]
