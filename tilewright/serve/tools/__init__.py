"""How models write calls of functions into their text: a format a file, read as the text comes."""
