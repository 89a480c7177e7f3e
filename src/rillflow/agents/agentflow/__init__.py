"""AgentFlow-Pro: a planner decides, an executor acts, a verifier says when it is enough, a memory keeps the state.

Only the planner is trained. The files in the order in which an episode meets them: loop, planner, actions, executor,
verifier; behind the episode: prm_text, collect, labels, judge.
"""
