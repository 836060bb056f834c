"""Bridge: a listener of one cluster sends each message on to another."""
