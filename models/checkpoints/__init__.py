"""Checkpoints: configuration and weights from any container.

`containers` opens a checkpoint, and `base` defines its interface. This file imports nothing,
because architectures use the key readers of this package, and containers use architectures.
"""
