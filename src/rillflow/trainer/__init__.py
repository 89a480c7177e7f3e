"""The trainer: leases batches, makes optimizer steps, publishes versions, commits, writes checkpoints.

    stream      what the trainer asks of the dataflow service, behind a small protocol
    renewal     keeps the lease of the batch in hand while a step computes
    parts       a batch as it comes in, leased part by part
    batches     a part becomes flat arrays (`Rows`)
    packing     rows become padded micro-batches
    forward     log-probs of the trained tokens, from the hidden states at their positions only
    algorithms  advantages, loss, aggregation: one small file each
    whole       the batch as a loss sees it, where an algorithm must see all of it first
    step        one optimizer step (`Learner`), part by part
    checkpoint  sealed folders of weights, optimizer state and position
    loop        the order of it all; main: wiring

Names of arrays and tensors end in their shape, one letter an axis:

    N  all tokens of a part, row after row        R  rows (samples) of the part
    B  rows of one micro-batch                    L  its padded length
    T  trained positions of a micro-batch         H  hidden size      V  vocabulary
"""
