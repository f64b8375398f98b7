"""`cgx doctor`: look at this machine, and try two ranks on it."""
