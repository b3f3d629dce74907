"""Matmuls of dense layers: bfloat16, e4m3 and block formats."""
