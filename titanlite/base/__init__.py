"""Floor of the package: errors, log, files, text for people, agreement of ranks, timers. Imports no
other room.
"""
