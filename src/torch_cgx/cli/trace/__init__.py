"""`cgx trace`: read the flight recorder's files."""
