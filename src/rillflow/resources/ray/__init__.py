"""What a run and a maintainer share of Ray: the cluster, what a worker asks of it, and the actor that hosts a role."""
