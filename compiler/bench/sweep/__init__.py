"""Many measurements as one piece of work: planned, run cell by cell, resumed, summed up.

Reading order: cell, plans, journal, runner, summary, then what is made of it.
"""
