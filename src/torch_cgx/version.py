"""The version: read by pyproject.toml for the package, and compared between ranks when a group is created."""

__version__ = "0.1.0"
