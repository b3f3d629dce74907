"""The typed program that targets with kernels of their own share: instructions over buffers, made
of a lowered graph. A target adds layouts, places and kernels.
"""
