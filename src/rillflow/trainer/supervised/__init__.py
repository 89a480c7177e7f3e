"""Supervised training on the trainer's own machinery: answers, reward models and process reward models.

shapes      what a row may look like
texts       rows to tokens, with what is trained or scored marked
examples    a source's rows, any of them as a databuffer
losses      of pairs and steps, and how good scores are
functions   the nodes of the step graphs
assembly    model, learner and step graph of a run
evaluation  held-out rows
journal     metrics.jsonl
fit         the order of it all; export: the finished model; main: one rank's process
reward_model  a finished reward model at work
"""
