"""Graph passes: a file per pass, with the name of its function. Targets list their passes in
order.
"""
