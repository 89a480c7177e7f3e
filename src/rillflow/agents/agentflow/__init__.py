"""AgentFlow-Pro: a planner decides, an executor acts, a verifier says when it is enough, a memory keeps the state.

Only the planner is trained. `loop` plays an episode and rewards its decisions, `models` has the planner and the
verifier, `options` the settings and prompts. `labels` works on finished runs.
"""
