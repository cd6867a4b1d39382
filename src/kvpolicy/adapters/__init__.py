"""Translations between the core's decisions and real engines."""
