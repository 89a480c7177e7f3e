"""The ledger: every prompt's way from admission to its one end, in one SQLite file.

Read `states` (the state machine), `schema` (what is stored) and `ledger` (the calls), then the chapters. Each table has
one writer; other modules change it through that one's methods.

    database     transactions, statements, counters; read-only snapshots
    tasks        tasks
    attempts     ended_attempts, and what follows from a completion
    payload      samples, units, segments, quarantine; lost rows
    groups       groups, tally, recent
    shares       shares, share_tally, stage_shares, extras, and statistics of complete groups
    batches      batches, members
    stages       stage_batches
    versions     policies, former, orphans, steps
    evaluations  rounds, round_sources
    nodes        nodes, retired, user_errors

`playing` keeps the groups that are playing, and their tasks, in memory.

These decide and write nothing themselves: `leasing` (which tasks a node gets), `streams` (what a trainer may get),
`serving` (what it is sent), `steps` (what a commit leaves), `course` (the phases of a run), and, beside this folder,
`group_rewards`.

A completed task goes through `service`, `ledger`, `tasks` and `attempts`; its last one settles the group in `groups`.
"""
