"""The way of a call: wrappers around each send and each call of a handler.

A send is a `SendCall`, a call of a handler is a `HandlerCall`. Middlewares, metrics, spans and message traces are
wrappers. Layers: `steps`; `send`; `handling`; and above them the wrappers.
"""
