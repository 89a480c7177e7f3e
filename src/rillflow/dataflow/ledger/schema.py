"""The ledger's tables, as SQL. `tables` has the struct of each table's rows; `states` has their states.

A *share* is what one complete group gives to one stream: the samples of policy `producer`, for the trainer of policy
`stream`. The module that writes a table is named in the package's docstring.
"""

FORMAT = 8

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
    started REAL,                    -- when a task of it was leased first
    scoring INTEGER NOT NULL DEFAULT 0,  -- all its tasks have ended, and its group's reward is being asked for
    admitted_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS groups_state ON groups (lane, state, ord);
CREATE INDEX IF NOT EXISTS groups_scoring ON groups (lane, ord) WHERE scoring = 1;
CREATE INDEX IF NOT EXISTS groups_round ON groups (round, state) WHERE lane = 'eval';

CREATE TABLE IF NOT EXISTS recent (  -- training groups that became complete since the stream's last step
    stream TEXT NOT NULL, grp TEXT NOT NULL, reward REAL NOT NULL, flat INTEGER NOT NULL,
    rewards INTEGER NOT NULL,        -- how many, of which `reward` is the mean
    at REAL NOT NULL,
    PRIMARY KEY (stream, grp)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tally (
    lane TEXT NOT NULL, state TEXT NOT NULL, cause TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (lane, state, cause)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS shares (
    grp TEXT NOT NULL, producer TEXT NOT NULL, stream TEXT NOT NULL,
    ord INTEGER NOT NULL,            -- of the group
    state TEXT NOT NULL,
    cause TEXT NOT NULL DEFAULT '',
    oldest INTEGER NOT NULL, newest INTEGER NOT NULL,  -- versions of the producer's trained tokens
    mean REAL NOT NULL, std REAL NOT NULL, size INTEGER NOT NULL,  -- over the producer's episodes
    samples INTEGER NOT NULL, tokens INTEGER NOT NULL,
    todo INTEGER NOT NULL,           -- stages that have not handled it yet
    batch TEXT,                      -- that holds it, or that it was trained in
    trained_into INTEGER,            -- the stream's version
    served INTEGER NOT NULL DEFAULT 0,   -- how often it was trained
    held INTEGER NOT NULL,           -- whether its rows may still be asked for
    damaged INTEGER NOT NULL DEFAULT 0,  -- a row of it was lost
    ended_at REAL,
    PRIMARY KEY (grp, producer, stream)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS shares_ready ON shares (stream, ord) WHERE state = 'ready';
CREATE INDEX IF NOT EXISTS shares_todo ON shares (stream, ord) WHERE state = 'ready' AND todo > 0;
CREATE INDEX IF NOT EXISTS shares_leased ON shares (stream, ord) WHERE state = 'leased';
CREATE INDEX IF NOT EXISTS shares_kept ON shares (stream, trained_into, ord) WHERE state = 'trained' AND held = 1;

CREATE TABLE IF NOT EXISTS share_tally (
    stream TEXT NOT NULL, state TEXT NOT NULL, cause TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (stream, state, cause)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS tasks (
    grp TEXT NOT NULL, place INTEGER NOT NULL,
    id TEXT GENERATED ALWAYS AS (grp || '.' || place) VIRTUAL,  -- look tasks up by grp and place: no index has it
    seed INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending',
    cause TEXT NOT NULL DEFAULT '', error TEXT NOT NULL DEFAULT '',
    attempt TEXT, node TEXT,              -- that hold it, or that it was done by
    ask TEXT,                             -- the attempt id of the request that leased it
    home TEXT,                            -- the node that plays the group
    last_node TEXT, returned_at REAL,
    leases INTEGER NOT NULL DEFAULT 0,    -- ever given; numbers the attempts
    failures INTEGER NOT NULL DEFAULT 0,  -- attempts used up
    returns INTEGER NOT NULL DEFAULT 0,   -- leases lost with their node
    leased_at REAL, ended_at REAL,        -- of its attempt
    digest TEXT,                          -- of the completion that was accepted
    reward REAL,
    given REAL,                           -- by its node: its group's reward is added to that
    samples INTEGER NOT NULL DEFAULT 0,
    calls INTEGER, seconds REAL, metrics TEXT,
    PRIMARY KEY (grp, place)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS ended_attempts (  -- that neither hold their task nor have done it
    id TEXT PRIMARY KEY, grp TEXT NOT NULL, place INTEGER NOT NULL, node TEXT NOT NULL,
    state TEXT NOT NULL, cause TEXT NOT NULL,
    digest TEXT,                             -- of the completion that was a failure
    leased_at REAL NOT NULL, ended_at REAL NOT NULL
) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS attempts (id, grp, place, node, state, cause, digest, leased_at, ended_at) AS
    SELECT attempt, grp, place, node, 'held', '', NULL, leased_at, NULL FROM tasks WHERE state = 'leased'
    UNION ALL
    SELECT attempt, grp, place, node, 'done', '', digest, leased_at, ended_at FROM tasks WHERE state = 'done'
    UNION ALL
    SELECT id, grp, place, node, state, cause, digest, leased_at, ended_at FROM ended_attempts;

CREATE TABLE IF NOT EXISTS samples (      -- sample n of the task at `place`; its id is grp.place.n
    grp TEXT NOT NULL, place INTEGER NOT NULL, n INTEGER NOT NULL, policy TEXT NOT NULL,
    unit TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    tokens INTEGER NOT NULL, trained INTEGER NOT NULL, oldest INTEGER NOT NULL, newest INTEGER NOT NULL,
    reward REAL NOT NULL, truncated INTEGER NOT NULL,
    live INTEGER NOT NULL,                -- whether its row may still be asked for
    agent TEXT NOT NULL, turn INTEGER NOT NULL,
    PRIMARY KEY (grp, place, n)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, policy TEXT NOT NULL, attempt TEXT NOT NULL UNIQUE, incarnation TEXT NOT NULL,
    version INTEGER NOT NULL,        -- of the trainer when it leased
    state TEXT NOT NULL DEFAULT 'leased',
    wanted INTEGER NOT NULL,         -- groups
    least INTEGER NOT NULL,          -- of a part; 0 for a batch that is served whole
    members INTEGER NOT NULL DEFAULT 0, parts INTEGER NOT NULL DEFAULT 0, complete INTEGER NOT NULL DEFAULT 0,
    samples INTEGER NOT NULL DEFAULT 0,
    produced INTEGER,                -- the version that its commit made
    deadline REAL NOT NULL, leased_at REAL NOT NULL, ended_at REAL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS batches_leased ON batches (policy) WHERE state = 'leased';
CREATE INDEX IF NOT EXISTS batches_produced ON batches (policy, produced) WHERE state = 'committed';
CREATE TABLE IF NOT EXISTS members (     -- shares in a batch, numbered in the order in which they are served
    batch TEXT NOT NULL, n INTEGER NOT NULL, grp TEXT NOT NULL, producer TEXT NOT NULL,
    part INTEGER NOT NULL,
    head INTEGER NOT NULL,           -- the producer's version when it was served
    replayed INTEGER NOT NULL,
    PRIMARY KEY (batch, n)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS stage_batches (
    id TEXT PRIMARY KEY, stream TEXT NOT NULL, stage TEXT NOT NULL, attempt TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL DEFAULT 'leased', version INTEGER NOT NULL, deadline REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS stage_batches_leased ON stage_batches (deadline) WHERE state = 'leased';
CREATE TABLE IF NOT EXISTS stage_shares (
    grp TEXT NOT NULL, producer TEXT NOT NULL, stream TEXT NOT NULL, stage TEXT NOT NULL,
    state TEXT NOT NULL, batch TEXT NOT NULL,
    PRIMARY KEY (grp, producer, stream, stage)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS stage_shares_batch ON stage_shares (batch);
CREATE TABLE IF NOT EXISTS extras (      -- rows that a stage added to the samples of a share, as long as it is held
    grp TEXT NOT NULL, producer TEXT NOT NULL, stream TEXT NOT NULL, stage TEXT NOT NULL,
    place INTEGER NOT NULL, n INTEGER NOT NULL,
    unit TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    PRIMARY KEY (grp, producer, stream, stage, place, n)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS extras_row ON extras (unit, segment, offset);

CREATE TABLE IF NOT EXISTS policies (
    name TEXT PRIMARY KEY, version INTEGER NOT NULL, highest INTEGER NOT NULL, steps INTEGER NOT NULL,
    restorable INTEGER NOT NULL DEFAULT 0,  -- what was trained into it or before is never asked for again
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
    version INTEGER,                 -- of the first policy
    versions TEXT NOT NULL DEFAULT '{}',
    capacity INTEGER NOT NULL DEFAULT 0, stats TEXT NOT NULL DEFAULT '{}',
    held INTEGER NOT NULL DEFAULT 0, held_eval INTEGER NOT NULL DEFAULT 0,  -- tasks leased to it now
    ends REAL NOT NULL DEFAULT 0, bad_ends REAL NOT NULL DEFAULT 0,  -- of episodes and of failed ones, decayed
    bad_row INTEGER NOT NULL DEFAULT 0,  -- failures since the last success
    pace REAL,                       -- seconds of an episode, a decayed mean
    made REAL NOT NULL DEFAULT 0, busy REAL NOT NULL DEFAULT 0,  -- samples and the episodes' seconds, decayed
    ended_at REAL,                   -- when an episode of it has ended last
    rate REAL NOT NULL DEFAULT 0, rate_at REAL, rate_accepted INTEGER NOT NULL DEFAULT 0,  -- samples a second of late
    active TEXT NOT NULL DEFAULT 'rollout',  -- the tag of what its worker does now
    leaving INTEGER NOT NULL DEFAULT 0,      -- it gets no more tasks
    leave_at REAL, drain REAL,       -- it was retired: when it has to be gone, and how many seconds it was given
    leased INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, refused INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    -- samples of the train lane: sent; taken; trained; refused or expired for their age
    produced INTEGER NOT NULL DEFAULT 0, accepted INTEGER NOT NULL DEFAULT 0, consumed INTEGER NOT NULL DEFAULT 0,
    stale INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retired (
    node TEXT NOT NULL, incarnation TEXT NOT NULL, PRIMARY KEY (node, incarnation)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS units (
    unit TEXT PRIMARY KEY, info TEXT NOT NULL, load REAL NOT NULL, seen REAL NOT NULL, state TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS segments (
    unit TEXT NOT NULL, segment INTEGER NOT NULL,
    live INTEGER NOT NULL,           -- rows that may still be asked for
    state TEXT NOT NULL DEFAULT 'live',
    touched REAL NOT NULL,           -- when `live` was changed last
    -- NULL for a segment with rows that were reported; else how many stage batches there were when its unit found it
    unreported INTEGER,
    PRIMARY KEY (unit, segment)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS segments_idle ON segments (touched) WHERE state = 'live' AND live = 0;
CREATE INDEX IF NOT EXISTS segments_dropping ON segments (unit) WHERE state = 'dropping';
CREATE TABLE IF NOT EXISTS quarantine (  -- rows that could not be read as they were written, and whose they were
    unit TEXT NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL,
    sample TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (unit, segment, offset)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS rounds (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, version INTEGER NOT NULL, state TEXT NOT NULL,
    versions TEXT NOT NULL,          -- of every policy, at least; `version` is the first policy's
    reward REAL, episodes INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    planned INTEGER NOT NULL, admitted_at REAL NOT NULL, ended_at REAL
);
CREATE INDEX IF NOT EXISTS rounds_running ON rounds (id) WHERE state = 'running';
CREATE INDEX IF NOT EXISTS rounds_step ON rounds (step);
CREATE TABLE IF NOT EXISTS round_sources (  -- of rounds that have ended, where the prompts are of several sources
    round INTEGER NOT NULL, source TEXT NOT NULL, reward REAL, PRIMARY KEY (round, source)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS hook_state (
    hook TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (hook, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS user_errors (
    kind TEXT NOT NULL, place TEXT NOT NULL, error TEXT NOT NULL, trace TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (kind, place)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY AUTOINCREMENT, line TEXT NOT NULL);
"""
