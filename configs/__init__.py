"""Hydra configuration groups, as YAML; the rooms' dataclasses are their schemas."""
