"""Turns public arguments into a `Call`: sequence bounds, decays, normalisation, relative positions, padding, sharding."""
