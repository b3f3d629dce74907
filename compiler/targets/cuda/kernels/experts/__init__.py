"""Routers and expert matmuls of mixture-of-experts layers."""
