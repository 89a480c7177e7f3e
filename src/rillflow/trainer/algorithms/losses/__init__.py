"""Losses of trained tokens, not yet weighted: one file for each formula, a small class that the step can call.

clip        PPO's clipped surrogate with dual clip: PPO, GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++; a critic's loss
gspo        the same with one ratio for a whole row
cispo       a bounded weight; every token keeps its gradient
sapo        a smooth gate instead of the clip
m2po        clip bounds, or a mask, from the batch's second moment
decoupled   the clip's centre differs from the policy that sampled
reinforce   the plain policy gradient with truncated importance weights
terms       truncated weights, KL and entropy bonus around any loss, and a user's own loss
"""
