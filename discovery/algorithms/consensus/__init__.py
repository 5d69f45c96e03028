"""Clusters that are found again: many trees of cells, each of half of the requests, and what they
agree on.

    cell_tree     cells of PCA space, and the tree of groups that they merge into
    found_again   how often each group of a tree has one like it in the trees of other requests
    lengths       groups that are one behaviour at several lengths of its requests
    partition     one partition of what many agree on, and the families above it
    regions       of a continuum, where they agree on little
    new_areas     what is new in one since the parent run
    continued     the parent run's clusters, where nothing has changed
    clusters      rows to clusters, by all of these

Imports what `discovery.algorithms` may import.
"""
