"""Prompts in, Rollout out; knows no algorithm."""
