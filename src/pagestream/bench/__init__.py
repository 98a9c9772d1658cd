"""The load generator: stated workloads, raw records of every request, statistics and reports."""
