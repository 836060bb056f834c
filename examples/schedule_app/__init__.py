"""An application as in Spring: a service sends a delayed message, and a listener receives it ten seconds later."""
