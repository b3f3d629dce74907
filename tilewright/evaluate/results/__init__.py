"""Result records, their file and statistics."""
