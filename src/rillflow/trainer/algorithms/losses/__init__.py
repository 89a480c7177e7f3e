"""Losses of trained tokens, not yet weighted: each file one idea, as a small class that the step can call, around
functions that say the formula.

    clip        PPO's pessimistic bound, with dual clip: PPO, GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++
    gspo        the same with one ratio for a whole row
    cispo       the ratio's weight is bounded, the gradient of no token is cut
    sapo        a smooth gate in place of the clip
    m2po        clip bounds, or a mask, from the batch's second moment
    decoupled   the clip's centre apart from the policy that sampled
    reinforce   plain policy gradient under truncated importance weights
    truncation  those weights, of tokens or of rows
    kl          distance from a reference; value: a critic's loss; entropy: a bonus
    terms       truncation, distance and bonus around any of these, as the recipe says
    own         a user's function
"""
