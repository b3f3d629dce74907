"""One readable engine.py out of a typed program: ``parts`` are the file's sections, `write`
puts them together around the program's plan.
"""
