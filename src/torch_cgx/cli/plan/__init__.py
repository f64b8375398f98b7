"""`cgx plan`: estimate what compression would gain."""
