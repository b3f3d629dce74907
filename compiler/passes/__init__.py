"""Graph passes: one a file, named as its function; targets list the ones they run, in order."""
