"""Checkpoints: configuration and weights, whatever container they are in.

`containers` opens one, `base` says what each of them offers. Nothing is imported here,
because architectures use this package's readers of keys, and the containers find architectures.
"""
