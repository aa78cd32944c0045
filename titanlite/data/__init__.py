"""Text to batches: corpus > tokenizer > tokens > dataset > loader; rows of examples > forms > chat
> encode > examples.

Importing this package does not import transformers (0.5 to 1 s): only the functions that return a
tokenizer do.
"""
