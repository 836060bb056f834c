"""Configuration as keys: files, environment, placeholders, and the binding of keys to typed sections."""
