"""Meshes of chips and ranks, and what runs over them: who the ranks are, how they meet."""
