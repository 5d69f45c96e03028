"""What attention did: fingerprints, their zones, and the code that computes them."""
