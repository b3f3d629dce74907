"""How models write function calls into their text: a format a file, read as the text comes."""
