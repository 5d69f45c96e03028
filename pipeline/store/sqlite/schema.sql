-- The fingerprint store, schema version 2.   sqlite3 fingerprints.db < schema.sql
-- Times are microseconds since 1970, UTC. Vectors are 20 little-endian float32: 80 bytes.

PRAGMA page_size = 8192;
PRAGMA journal_mode = WAL;

BEGIN IMMEDIATE;

-- What makes vectors comparable. One row per model, capture_id and layout.
CREATE TABLE captures (
    capture_ref INTEGER PRIMARY KEY AUTOINCREMENT,
    model TEXT NOT NULL,
    capture_id TEXT NOT NULL,
    layout INTEGER NOT NULL,
    UNIQUE (model, capture_id, layout)
);

-- One row per client session of a capture, and one (session_id NULL) for the rows without a
-- session. The counts are of all rows ever appended; pruning does not lower them. The zones are
-- those of the standard thresholds.
CREATE TABLE sessions (
    session_ref INTEGER PRIMARY KEY AUTOINCREMENT,
    session_id TEXT,
    capture INTEGER NOT NULL REFERENCES captures,
    requests INTEGER NOT NULL DEFAULT 0,
    fingerprints INTEGER NOT NULL DEFAULT 0,
    first_at INTEGER,
    last_at INTEGER,
    syntax_floor INTEGER NOT NULL DEFAULT 0,
    semantic_bridge INTEGER NOT NULL DEFAULT 0,
    long_range INTEGER NOT NULL DEFAULT 0,
    structure_ripple INTEGER NOT NULL DEFAULT 0,
    diffuse INTEGER NOT NULL DEFAULT 0,
    UNIQUE (capture, session_id)
);
CREATE UNIQUE INDEX sessions_without_id ON sessions (capture) WHERE session_id IS NULL;
CREATE INDEX sessions_by_time ON sessions (last_at);

-- Request ids, interned. `page` holds the high bits of positions past 2^24 and layers past 510, and
-- is 0 otherwise: ((layer + 1) >> 9 << 8) | (position >> 24).
CREATE TABLE requests (
    request_ref INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL,
    page INTEGER NOT NULL DEFAULT 0,
    UNIQUE (request_id, page)
);

-- What fingerprints were a part of: the response of an engine, the span of a trace (W3C). One row per
-- pair, and none for two nulls. last_at: the latest time of a fingerprint with this pair.
CREATE TABLE traces (
    trace_ref INTEGER PRIMARY KEY AUTOINCREMENT,
    response_id TEXT,
    traceparent TEXT,
    last_at INTEGER NOT NULL,
    UNIQUE (response_id, traceparent)
);

-- One row per fingerprint, numbered in order of arrival.
-- key = (request_ref << 33) | ((position & 0xFFFFFF) << 9) | ((layer + 1) & 511)
-- phase: 0 prompt, 1 think, 2 output. top_experts: little-endian int16.
CREATE TABLE fingerprints (
    seq INTEGER PRIMARY KEY,
    key INTEGER NOT NULL,
    vector BLOB NOT NULL,
    capture INTEGER NOT NULL REFERENCES captures,
    captured_at INTEGER NOT NULL,
    session INTEGER NOT NULL REFERENCES sessions,
    phase INTEGER NOT NULL,
    prompt_len INTEGER,
    token_id INTEGER,
    sink_mass REAL,
    router_entropy REAL,
    top_experts BLOB,
    trace INTEGER REFERENCES traces
);
CREATE UNIQUE INDEX fingerprints_by_key ON fingerprints (key);

-- The fingerprints as readable records: SELECT * FROM records LIMIT 10.
CREATE VIEW records AS SELECT
    seq,
    request_id,
    session_id,
    ((key >> 9) & 0xFFFFFF) | ((page & 0xFF) << 24) AS position,
    prompt_len,
    ((key & 511) | ((page >> 8) << 9)) - 1 AS layer,
    strftime('%Y-%m-%dT%H:%M:%SZ', captured_at / 1000000, 'unixepoch') AS captured_at,
    model,
    capture_id,
    layout,
    CASE phase WHEN 0 THEN 'prompt' WHEN 1 THEN 'think' ELSE 'output' END AS phase,
    token_id,
    sink_mass,
    router_entropy,
    response_id,
    traceparent,
    vector
FROM fingerprints
    JOIN requests ON requests.request_ref = key >> 33
    JOIN captures ON captures.capture_ref = fingerprints.capture
    JOIN sessions ON sessions.session_ref = fingerprints.session
    LEFT JOIN traces ON traces.trace_ref = fingerprints.trace;

-- A summary of each 65,536 sequence numbers, so that a time window or a count of groups reads a few
-- summaries instead of every row. block = seq >> 16
CREATE TABLE blocks (
    block INTEGER NOT NULL,
    capture INTEGER NOT NULL REFERENCES captures,
    fingerprints INTEGER NOT NULL,
    first_at INTEGER NOT NULL,
    last_at INTEGER NOT NULL,
    PRIMARY KEY (block, capture)
) WITHOUT ROWID;

-- Integers by name: next_seq, duplicates, and `rejected: <reason>`.
CREATE TABLE totals (
    name TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO totals VALUES ('next_seq', 1), ('duplicates', 0);

CREATE TABLE discovery_runs (
    run_id TEXT PRIMARY KEY,
    created_at TEXT NOT NULL,
    status TEXT,
    engine TEXT,
    model TEXT,
    layout INTEGER,
    capture_id TEXT,
    rows INTEGER,
    clusters INTEGER,
    noise_share REAL,
    output TEXT,
    manifest TEXT
);

CREATE TABLE clusters (
    run_id TEXT NOT NULL REFERENCES discovery_runs ON DELETE CASCADE,
    cluster_id INTEGER NOT NULL,
    label TEXT,
    zone TEXT,
    size INTEGER,
    share REAL,
    persistence REAL,
    centroid BLOB,
    details TEXT,
    PRIMARY KEY (run_id, cluster_id)
) WITHOUT ROWID;

-- "attn" in ASCII, so that another program's file is not mistaken for a store.
PRAGMA application_id = 1635021934;
PRAGMA user_version = 2;

COMMIT;
