"""Graph passes: a file per pass, with its function's name. Targets list their passes in
order.
"""
