"""Pulls that are answered without decoding each request, and the checks of all pulls."""
