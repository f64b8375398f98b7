"""A process group with backend "cgx": the methods that torch calls, and the engines that carry them out."""
