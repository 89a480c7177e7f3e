"""Lies beside the helpers, so that tests in the folders below find them."""
