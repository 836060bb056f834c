"""Django app with the backend of Django's tasks: the table of the results, the queue, and the worker."""
