"""Many measurements as one piece of work: planned, run cell by cell, resumed, summed up.

Reading order. A sweep: trial, model, levels, plans, journal, runner. Its figures: summary,
leaderboard, export. What parts cost: cost_model, sensitivity. The search: search (pure),
search_plan, hunt, found.
"""
