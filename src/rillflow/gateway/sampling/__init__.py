"""The engines of a node: one stream of tokens for each call, and which engines may sample."""
