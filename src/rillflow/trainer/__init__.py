"""The trainer: leases batches, makes optimizer steps, publishes versions, commits, writes checkpoints.

    stream      what the trainer asks of the dataflow service, behind a small protocol; renewal keeps a batch's lease
    parts       a batch as it comes in, leased part by part; batches: a part becomes flat arrays (`Rows`)
    graph       a step as a graph of nodes over databuffers: planner, pipeline, worker, the nodes' functions
    algorithms  advantages, losses, aggregation: one small file each; whole: where one must see the whole batch first
    objective   what a model is trained for; learner: a role's model at work; metrics: what a step says of its batch
    packing     rows become micro-batches without padding; forest: what they share; layout: how the model reads them
    attention   one small file a backend; forward, heads: log-probs and values from hidden states
    models      the models of the roles; lora: adapters; optimizer: fp32 masters, whatever computes
    parallel    ranks as peers: collectives, sharding, launching, redistribution, static data
    checkpoint  sealed folders of weights, optimizer state and position; slices: any number of ranks reads them
    publisher   weights on their way to the store, while the next step computes; background: one thing at a time
    loop        the order of it all; main: wiring; process: what every process that trains does
    supervised  SFT and reward models on the same graph machinery

Names of arrays and tensors end in their shape, one letter an axis:

    N  all tokens of a part, row after row        R  rows (samples) of the part
    T  trained tokens of a micro-batch            P  its packed tokens      S  its segments
    D  hidden size                                V  vocabulary
"""
