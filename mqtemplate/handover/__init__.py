"""Hand-over of an application from an old broker to a new one, while it runs."""
