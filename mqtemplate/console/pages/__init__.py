"""Pages of the dashboard. Each module has functions from a call to a response, and their routes."""
