"""Launcher and its ranks: start, guard, restart, and the files in which they talk to each other."""
