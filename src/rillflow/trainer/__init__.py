"""The trainer: leases batches, makes optimizer steps, publishes versions, commits, writes checkpoints.

    loop           the order of a step's actions; main builds and runs a trainer; process: torch's settings, signals
    stream         the batches of a trainer, of one rank or several, part by part; remote_stream: over HTTP
    batches        a batch as flat arrays (`Rows`), and the databuffers that carry it between nodes
    graph          a step as a graph of nodes: planner, worker, the functions of the nodes
    algorithms     one table of compositions; advantages, losses (one file for each formula), aggregations
    learner        a role's model learns for an objective; metrics: the measurements of a step
    packing        rows become micro-batches without padding, with common prefixes stored once
    attention      how a model reads packed rows; forward and lm_head: log-probs and values from hidden states
    roles          builds the worker: models, optimizers, learners; lora: adapters; optimizer: fp32 masters
    parallel       ranks as peers: collectives, launching, sharding, redistribution
    checkpoint     sealed folders of weights, optimizer state and position, for any number of ranks
    publisher      weights to the store while the next step computes; background: one piece of work at a time
    offload        optimizer state in host memory or a file while a worker samples
    utilisation    model FLOPs utilisation
    supervised     SFT and reward models on the same step graphs

Names of arrays and tensors end in their shape, one letter for each axis:

    N  all tokens of a part, row after row        R  rows (samples) of the part
    T  trained tokens of a micro-batch            P  its packed tokens      S  its segments
    D  hidden size                                V  vocabulary
"""
