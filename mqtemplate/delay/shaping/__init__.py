"""Release shaping: the rate, jitter, spread and priority with which the delayed messages of a topic are released."""
