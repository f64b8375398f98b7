"""A process group with backend "cgx": what torch calls, and who carries it out."""
