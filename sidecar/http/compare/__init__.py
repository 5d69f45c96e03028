"""GET and POST /compare: how two sets of fingerprints differ."""
