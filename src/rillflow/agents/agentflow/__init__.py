"""AgentFlow-Pro: a planner decides, an executor acts, a verifier says when it is enough, a memory keeps the state.

Only the planner is trained. The modules in the order in which an episode meets them: loop, planner, verifier,
step_rewards. `labels` works on finished runs.
"""
