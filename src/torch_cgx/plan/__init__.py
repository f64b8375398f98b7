"""Collectives as data: programs, their layouts, and the code that proves and simulates them. Pure."""
