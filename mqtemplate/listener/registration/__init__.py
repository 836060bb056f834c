"""Registration of listeners: what may change their attributes, and what the attributes choose for each of them."""
