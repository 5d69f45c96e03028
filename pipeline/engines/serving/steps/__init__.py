"""In the process that runs a model, whichever engine it is of: what is held of the requests and
rows of a step, and how its results become records and entries.
"""
