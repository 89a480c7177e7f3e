"""AgentFlow-Pro: a planner decides, an executor acts, a verifier says when it is enough, a memory keeps the state.

Only the planner is trained. The modules in the order in which an episode meets them: loop, planner, actions, executor,
verifier, step_rewards. Modules that work on finished runs: collect, labels, judge. `prm_text` is for both.
"""
