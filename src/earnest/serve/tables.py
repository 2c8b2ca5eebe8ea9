"""The tables of the server's database: adapters, versions, completions, feedback, and the runs of Tinker clients."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS adapters(
  id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, created REAL NOT NULL, learn TEXT NOT NULL,
  live INTEGER NOT NULL DEFAULT 0, pinned INTEGER NOT NULL DEFAULT 0, next INTEGER NOT NULL DEFAULT 1,
  origin TEXT);
CREATE TABLE IF NOT EXISTS versions(
  adapter INTEGER NOT NULL REFERENCES adapters(id) ON DELETE CASCADE, number INTEGER NOT NULL, parent INTEGER NOT NULL,
  created REAL NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL, record TEXT NOT NULL,
  PRIMARY KEY(adapter, number));
CREATE TABLE IF NOT EXISTS completions(
  id TEXT NOT NULL, choice INTEGER NOT NULL, created REAL NOT NULL, adapter INTEGER, model TEXT NOT NULL,
  version INTEGER NOT NULL, key TEXT NOT NULL, kind TEXT NOT NULL, messages TEXT NOT NULL, prompt BLOB NOT NULL,
  tokens BLOB NOT NULL, logprobs BLOB NOT NULL, temperature REAL NOT NULL, sampling TEXT NOT NULL, text TEXT NOT NULL,
  finish TEXT NOT NULL, PRIMARY KEY(id, choice));
CREATE TABLE IF NOT EXISTS feedback(
  seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, received REAL NOT NULL,
  adapter INTEGER NOT NULL REFERENCES adapters(id) ON DELETE CASCADE, completion TEXT NOT NULL,
  choice INTEGER NOT NULL, key TEXT NOT NULL, text TEXT, thumbs TEXT, better TEXT, status TEXT NOT NULL,
  version INTEGER, note TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS tinker_runs(
  id TEXT PRIMARY KEY, base_model TEXT NOT NULL, lora TEXT NOT NULL, metadata TEXT NOT NULL,
  last_request TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS tinker_checkpoints(
  run TEXT NOT NULL REFERENCES tinker_runs(id), kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL,
  time TEXT NOT NULL, size INTEGER NOT NULL, metadata TEXT NOT NULL, expires TEXT, PRIMARY KEY(run, kind, name));
CREATE INDEX IF NOT EXISTS feedback_queue ON feedback(adapter, status, seq);
CREATE INDEX IF NOT EXISTS completions_by_adapter ON completions(adapter, created);
"""
