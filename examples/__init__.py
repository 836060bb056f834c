"""Applications that use nothing but the public names of `mqtemplate`; each runs by ``python -m examples.<name>``."""
