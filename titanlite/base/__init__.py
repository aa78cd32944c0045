"""Base of the package: errors, log, files, text formatting, agreement of ranks, timers. Imports no
other subpackage.
"""
