"""CPUs, through a library of our own: packed panels, one parallel region a step.

A row's bits depend neither on the batch it is in nor on how its prompt was cut. A packed program
is run without torch: only ``target`` while it builds, and what that imports then, knows graphs.
"""
