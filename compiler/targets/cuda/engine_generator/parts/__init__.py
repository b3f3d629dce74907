"""The sections of a generated engine, as modules, so that they are checked and tested where they
stand. They import torch, Triton where it is there, and each other.
"""
