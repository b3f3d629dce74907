"""The typed program that targets with their own kernels share: instructions over buffers, made
of a lowered graph. A target adds layouts, places and kernels.
"""
