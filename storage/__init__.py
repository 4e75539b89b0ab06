"""The target cache: contract, codec, shards, commits, manifest, reading order, reader and checkpoints (DESIGN, section 4).

Knows no model and no Ray.
"""
