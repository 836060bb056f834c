"""The broker itself, without sockets: everything that a protocol or the embedded broker needs."""
