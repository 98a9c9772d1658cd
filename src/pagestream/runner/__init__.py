"""Executes a SchedulerOutput on a device and returns its tokens."""
