"""Argmax, filters, random sampling and grammar masks on the device."""
