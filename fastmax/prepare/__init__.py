"""From public arguments to a `Call`: sequence bounds, decays, normalisation, relative positions, padding, shards."""
