"""titanlite: a compact trainer for large language models, meta-device first.

A model is described and sharded on the meta device; then every tensor is written exactly once, into its final
shard, from one declared source. Start reading at `titanlite/trainer.py`.
"""

__version__ = "0.1.0"
