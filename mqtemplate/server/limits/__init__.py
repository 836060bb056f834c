"""Limits of what clients hold and create, so that one client cannot take the memory or the time of the others."""
