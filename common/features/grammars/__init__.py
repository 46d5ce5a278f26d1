"""Grammars: which tokens may come next in an output, from what its request says of the whole."""
