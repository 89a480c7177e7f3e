"""Supervised training on the trainer's step graphs: answers (SFT), reward models and process reward models.

examples      the accepted rows, and a source's rows as databuffers
texts         conversations and texts to tokens, with the trained or scored tokens marked
functions     losses, nodes of the step graphs, evaluation of held-out rows
fit           the run: batches, checkpoints, metrics.jsonl, one rank's process and the exported model
reward_model  a trained reward model in use, and the quality of scores: ranking, calibration, correlation
"""
