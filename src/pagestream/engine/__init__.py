"""The engine: the core step loop, the offline API over it and the thread that drives it."""
