"""One readable engine.py out of a typed program: ``parts`` are the sections of the file, `write`
puts them together around the plan of the program.
"""
