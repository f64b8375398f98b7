"""`cgx bench`: measure, with the result checked first."""
