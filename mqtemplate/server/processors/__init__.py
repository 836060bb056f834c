"""Processors of the requests that producers and consumers send, one module for each kind of request."""
