"""The call of a handler: its parameters, the scope of one message, middlewares around it, and what it sends on."""
