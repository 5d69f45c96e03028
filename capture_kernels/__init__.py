"""What attention did: no storage and no HTTP.

`fingerprint/` defines the 20 numbers and their zones (NumPy, torch). `decode/` computes them in
Triton beside a decode step, `scores/` full attention rows of a prompt, `ring/` keeps records in
device memory. Imports run ring -> decode -> fingerprint and scores -> launch; nothing here imports
another package of the project.
"""
