"""Declaration of listeners: decorators, attributes, and the settings that they resolve to."""
