"""How ranks find each other, compare their settings, and open what they share."""
