"""Workers that handle every sample of a policy before its trainer gets it, and add columns to it.

stage    the contract of a stage, and how one is made from its section of the recipe
shipped  log-probs of a reference model, for the KL term; scores of a reward model, added to the reward
worker   lease, read, compute, write, commit; until the run has ended
"""

from rillflow.stages.stage import Stage, build_stage, check_stages

__all__ = ["Stage", "build_stage", "check_stages"]
