"""Location of the messages: the folder of an embedded broker, or a cluster. Reads there, and connections."""
