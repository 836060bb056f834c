"""The index: from the keys of a message to its record in the commit log."""
