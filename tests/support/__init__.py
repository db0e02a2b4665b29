"""Test doubles and helpers that tests of several packages share."""
