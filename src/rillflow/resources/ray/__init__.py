"""Ray as a run and a maintainer share it: the cluster, the resources of a worker, the actor that hosts a role."""
