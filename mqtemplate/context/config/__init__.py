"""Configuration: files, profiles, environment and placeholders as one tree of keys."""
