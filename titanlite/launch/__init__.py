"""The launcher and its ranks: start, guard, restart, and the files through which they
communicate.
"""
