"""Sections of a generated engine, as modules for checks and tests.

They import torch, Triton if installed, and other sections.
"""
