"""Token trees: where a call belongs, how messages become ids, what a session leaves."""
