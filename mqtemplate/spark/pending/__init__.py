"""The pending messages of a broker as a DataFrame, and changes of them by DataFrame."""
