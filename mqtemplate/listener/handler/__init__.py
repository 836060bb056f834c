"""The call of a handler: its signature and arguments, what is around it, and its results."""
