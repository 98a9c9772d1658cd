"""Model families and the loading of their weights."""
