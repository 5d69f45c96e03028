"""What takes a SQLite store from each schema version to the next.

A script is never changed once it is released: files that it made are out there.
"""

from __future__ import annotations

# The oldest version that a reader, which changes nothing, reads as it is: what such a file lacks
# (rows.py) is null.
OLDEST_READABLE = 1

_TRACES = """
CREATE INDEX sessions_by_time ON sessions (last_at);
CREATE TABLE traces (
    trace_ref INTEGER PRIMARY KEY AUTOINCREMENT,
    response_id TEXT,
    traceparent TEXT,
    last_at INTEGER NOT NULL,
    UNIQUE (response_id, traceparent)
);
ALTER TABLE fingerprints ADD COLUMN trace INTEGER REFERENCES traces;
DROP VIEW records;
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
"""

# MIGRATIONS[i] is the SQL script that takes a file from schema version i + 1 to i + 2.
MIGRATIONS: tuple[str, ...] = (_TRACES,)
