"""Dead letters: their causes, and what administrators do with them."""
