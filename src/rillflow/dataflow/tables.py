"""The ledger's tables. They hold states and metadata, never tokens; the database is the only state there is.

States:
    groups    playing -> ready -> leased -> trained, or filtered, expired, failed; evaluation groups -> evaluated
    tasks     pending -> leased -> done, failed, cancelled; back to pending when a lease or a version is lost
    attempts  held -> done, failed, returned, cancelled: one row for every lease of a task that was ever given
    batches   leased -> committed -> rolled_back, or leased -> released
    steps     live or orphaned: one row for every committed version of the policy
    rounds    running -> ended, or orphaned by a rollback: one row for every evaluation
"""

from __future__ import annotations

FORMAT = 1
NEWEST = (1 << 62) - 1  # above every version and position

GROUP_OPEN = ("playing", "ready", "leased")
GROUP_ENDED = ("trained", "filtered", "expired", "failed", "evaluated")
ATTEMPT_STATES = ("done", "failed", "returned", "cancelled", "held")

TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS groups (
    id TEXT PRIMARY KEY,
    lane TEXT NOT NULL,
    round INTEGER NOT NULL,          -- the evaluation round; 0 for training
    ord INTEGER NOT NULL,            -- order of admission: the position in the source's sequence
    prompt TEXT NOT NULL,            -- the prompt's id; its payload stays in the source
    planned INTEGER NOT NULL,        -- tasks of the group
    state TEXT NOT NULL,
    cause TEXT NOT NULL DEFAULT '',
    mean REAL, std REAL, size INTEGER,
    oldest INTEGER, newest INTEGER,  -- versions of its trained tokens
    admitted_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_state ON groups (lane, state, ord);
CREATE INDEX IF NOT EXISTS groups_open ON groups (newest) WHERE state IN ('playing', 'ready');
CREATE INDEX IF NOT EXISTS groups_round ON groups (round, state) WHERE lane = 'eval';

CREATE TABLE IF NOT EXISTS recent (  -- training groups that became complete since the last step, kept or not
    grp TEXT PRIMARY KEY, reward REAL NOT NULL, flat INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tally (
    lane TEXT NOT NULL, state TEXT NOT NULL, cause TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (lane, state, cause)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tasks (
    id TEXT PRIMARY KEY,
    grp TEXT NOT NULL, lane TEXT NOT NULL, round INTEGER NOT NULL, ord INTEGER NOT NULL, place INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending',
    cause TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '',
    attempt TEXT, node TEXT, deadline REAL,
    last_node TEXT, returned_at REAL,
    leases INTEGER NOT NULL DEFAULT 0,    -- ever given; numbers the attempts
    failures INTEGER NOT NULL DEFAULT 0,  -- attempts used up
    returns INTEGER NOT NULL DEFAULT 0,   -- leases lost with their node
    reward REAL, samples INTEGER NOT NULL DEFAULT 0,
    calls INTEGER, seconds REAL, metrics TEXT
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS tasks_group ON tasks (grp, place);
-- A query uses these two only when it names the state in so many words.
CREATE INDEX IF NOT EXISTS tasks_pending ON tasks (lane, round, ord, place) WHERE state = 'pending';
CREATE INDEX IF NOT EXISTS tasks_leased ON tasks (deadline) WHERE state = 'leased';

CREATE TABLE IF NOT EXISTS attempts (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, node TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'held', cause TEXT NOT NULL DEFAULT '',
    leased_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS samples (
    id TEXT PRIMARY KEY, grp TEXT NOT NULL, task TEXT NOT NULL, n INTEGER NOT NULL, policy TEXT NOT NULL,
    unit TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    tokens INTEGER NOT NULL, trained INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL,
    reward REAL NOT NULL, truncated INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS samples_group ON samples (grp, task);

CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, policy TEXT NOT NULL, attempt TEXT NOT NULL UNIQUE, incarnation TEXT NOT NULL,
    version INTEGER NOT NULL,        -- of the trainer when it leased
    state TEXT NOT NULL DEFAULT 'leased',
    produced INTEGER,                -- the version that its commit made
    samples INTEGER NOT NULL, deadline REAL NOT NULL, leased_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_state ON batches (state) WHERE state = 'leased';
CREATE TABLE IF NOT EXISTS batch_groups (
    batch TEXT NOT NULL, grp TEXT NOT NULL, staleness INTEGER NOT NULL, PRIMARY KEY (batch, grp)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS policies (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL, highest INTEGER NOT NULL, steps INTEGER NOT NULL,
    incarnation TEXT, joined TEXT    -- the reply to the latest join, repeated when it is asked again
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS former (   -- trainers that another one has replaced
    policy TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (policy, incarnation)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
    policy TEXT NOT NULL, version INTEGER NOT NULL, parent INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'live',
    batch TEXT NOT NULL, samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    reward REAL NOT NULL, staleness REAL NOT NULL, step_seconds REAL NOT NULL, wait_seconds REAL NOT NULL,
    metrics TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (policy, version)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS orphans (  -- versions v with low < v <= high died with their trainer
    policy TEXT NOT NULL, low INTEGER NOT NULL, high INTEGER NOT NULL
);

CREATE TABLE IF NOT EXISTS nodes (
    name TEXT PRIMARY KEY, incarnation TEXT NOT NULL, state TEXT NOT NULL, seen REAL NOT NULL,
    version INTEGER, capacity INTEGER NOT NULL DEFAULT 0, stats TEXT NOT NULL DEFAULT '{}',
    leased INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    produced INTEGER NOT NULL DEFAULT 0, accepted INTEGER NOT NULL DEFAULT 0, consumed INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retired (
    node TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (node, incarnation)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS rounds (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL,
    reward REAL, episodes INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    planned INTEGER NOT NULL, admitted_at REAL NOT NULL, ended_at REAL
);
CREATE INDEX IF NOT EXISTS rounds_running ON rounds (id) WHERE state = 'running';
CREATE INDEX IF NOT EXISTS rounds_step ON rounds (step);
CREATE TABLE IF NOT EXISTS hooks (name TEXT PRIMARY KEY, state TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL);
"""
