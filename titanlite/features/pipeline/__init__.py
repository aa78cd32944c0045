"""Pipeline parallelism: 1F1B and interleaved 1F1B."""
