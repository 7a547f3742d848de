"""Typed configuration: `schema` says what exists, `load` reads YAML and overrides into it."""
