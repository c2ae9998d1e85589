"""Sweeps: many trials of one recipe, of which the best go on."""
