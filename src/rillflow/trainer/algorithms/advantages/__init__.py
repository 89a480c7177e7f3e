"""Advantages: which rows, answers or tokens were better than expected. Numbers in, numbers out, in float64.

    groups     a row against the other rows of its group: GRPO, Dr.GRPO, RLOO
    agents     which rows make a group where several agents or turns share a prompt: Dr. MAS, AT-GRPO, Flow-GRPO
    process    rewards of single answers become advantages of their tokens
    returns    rewards of tokens become returns (REINFORCE++) or, with a critic's values, advantages (GAE)
    whitening  over all trained tokens of a batch
    shaping    what is taken off a reward beforehand: a length

Arrays over T hold trained tokens only, row after row; `row_T` names the row of each. What lies between two of them (a
tool's words) is not there, so whatever runs along a row carries through it.
"""
