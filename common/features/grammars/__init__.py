"""Grammars: masks of the tokens that can come next, so that an output fits a request's grammar."""
